"""The output side of a sequence: what ends it, what its text is, and that replay rebuilds it."""

from __future__ import annotations

import numpy as np
import pytest

from baton.arena.replay import LogHead, LogView
from baton.engine.finish import EndRule
from baton.engine.sampling import SampledToken
from baton.sampling_parameters import SamplingParameters
from baton.worker.output import OutputState, OutputToken, replay_output

END = 25
RULE = EndRule(end_token_ids=frozenset({END}), max_context=12)


class Letters:
    """Token n is the n-th letter, 25 a control token, 24 half a character."""

    def decode_bytes(self, token_id: int) -> bytes:
        """One byte."""
        return b"\xe4" if token_id == 24 else bytes([97 + token_id])

    def is_special(self, token_id: int) -> bool:
        """The end token is."""
        return token_id == END


def state(prompt: int = 4, **parameters: object) -> OutputState:
    """A fresh output under greedy parameters."""
    values: dict[str, object] = {"temperature": 0.0, "max_tokens": 100} | parameters
    # One dict for all fields.
    sampling = SamplingParameters(**values)  # type: ignore[arg-type]
    return OutputState(range(prompt), sampling, RULE, Letters())


def feed(output: OutputState, *ids: int) -> list[OutputToken]:
    """Take tokens one by one."""
    return [output.take(SampledToken(token_id=token_id)) for token_id in ids]


def test_an_end_token_ends_without_text() -> None:
    """Its spelling is no part of the answer; text that was held back is."""
    tokens = feed(state(), 0, 24, END)
    assert [token.text for token in tokens] == ["a", "", "\ufffd"]
    assert [token.finish_reason for token in tokens] == [None, None, "stop"]


def test_ignore_eos_goes_on_past_the_end_token() -> None:
    """And the control token still spells nothing."""
    tokens = feed(state(ignore_eos=True), 0, END, 1)
    assert [token.text for token in tokens] == ["a", "", "b"]
    assert tokens[-1].finish_reason is None


def test_a_stop_token_id_ends_without_its_text() -> None:
    """It is a token of the vocabulary, but it was asked to be a mark."""
    tokens = feed(state(stop_token_ids=(1,)), 0, 1)
    assert [token.text for token in tokens] == ["a", ""]
    assert tokens[-1].finish_reason == "stop"


def test_max_tokens_one_is_one_token_with_its_text() -> None:
    """The shortest answer."""
    (token,) = feed(state(max_tokens=1), 3)
    assert (token.text, token.finish_reason, token.index) == ("d", "length", 0)


def test_the_context_ends_the_answer() -> None:
    """Prompt and output together fill it."""
    tokens = feed(state(prompt=10), 0, 1)
    assert [token.finish_reason for token in tokens] == [None, "length"]


def test_a_stop_string_across_tokens_never_leaks() -> None:
    """Text that could become it is held back; the match is named and cut off."""
    tokens = feed(state(stop_strings=("bc",)), 0, 1, 2)
    assert [token.text for token in tokens] == ["a", "", ""]
    assert tokens[-1].stop_string == "bc"
    assert tokens[-1].finish_reason == "stop"


def test_a_stop_string_wins_over_a_length_end_on_the_same_token() -> None:
    """The client asked for it; `length` would ask for more."""
    tokens = feed(state(stop_strings=("b",), max_tokens=2), 0, 1)
    assert (tokens[-1].finish_reason, tokens[-1].stop_string) == ("stop", "b")


def test_held_text_is_flushed_at_a_length_end() -> None:
    """No stop string can come any more."""
    tokens = feed(state(stop_strings=("bz",), max_tokens=2), 0, 1)
    assert [token.text for token in tokens] == ["a", "b"]
    assert tokens[-1].finish_reason == "length"


def test_choose_takes_the_sampled_token() -> None:
    """Greedy on the largest logit, with log probabilities where asked for."""
    logits = np.zeros(26, np.float32)
    logits[7] = 3.0
    token = state(logprobs=True, top_logprobs=2).choose(logits)
    assert token.sampled.token_id == 7
    assert token.sampled.logprob is not None
    assert len(token.sampled.top_logprobs) == 2


@pytest.mark.parametrize("cut", range(1, 7))
def test_replay_at_any_token_continues_as_if_never_interrupted(cut: int) -> None:
    """What was said never changes, and what follows is the same."""
    ids = (0, 1, 24, 1, 2, 3, 4)
    parameters: dict[str, object] = {"stop_strings": ("cde",)}
    whole = feed(state(**parameters), *ids)
    view = view_of(ids[:cut], **parameters)
    again, replayed = replay_output(view, RULE, Letters())
    assert list(replayed) == whole[:cut]
    assert feed(again, *ids[cut:]) == whole[cut:]


def test_replay_of_a_finished_log_keeps_its_end() -> None:
    """The same reason, stop string and text as when it was said."""
    whole = feed(state(stop_strings=("bc",)), 0, 1, 2)
    view = view_of((0, 1, 2), finish_reason="stop", stop_strings=("bc",))
    _, replayed = replay_output(view, RULE, Letters())
    assert list(replayed) == whole


def test_a_log_that_ended_on_a_shorter_context_keeps_its_end() -> None:
    """Another worker's limit ended it; what was said never changes."""
    view = view_of((0, 24), finish_reason="length")
    output, replayed = replay_output(view, RULE, Letters())
    assert output.finish_reason == "length"
    assert replayed[-1].finish_reason == "length"
    assert replayed[-1].text == "\ufffd"


def view_of(
    output: tuple[int, ...], finish_reason: str | None = None, **parameters: object
) -> LogView:
    """A replayed log of four prompt tokens and `output`."""
    values: dict[str, object] = {"temperature": 0.0, "max_tokens": 100} | parameters
    head = LogHead(
        log_id=bytes(16),
        generation=1,
        position=4 + len(output),
        prompt_tokens=4,
        committed_position=4,
        cached_tokens=0,
        is_sealed=True,
        # One dict for all fields.
        sampling=SamplingParameters(**values),  # type: ignore[arg-type]
        finish_reason=finish_reason,
    )
    return LogView(head=head, token_ids=(0, 1, 2, 3, *output), rows=(), lsn=1)
