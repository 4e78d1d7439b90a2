"""One sequence: nothing leaves before its ack, one append ahead, pages asked for in time."""

from __future__ import annotations

import numpy as np
import pytest

from baton.arena.append import AppendOutcome
from baton.arena.checksums import SlotChecksum
from baton.arena.page_table import PageTable
from baton.arena.replay import GrantedPage, HeldLog, PageRow
from baton.engine.finish import EndRule
from baton.engine.sampling import SampledToken
from baton.errors import Reason, ServiceError
from baton.sampling_parameters import SamplingParameters
from baton.worker.output import OutputState, OutputToken
from services.decode.machine import Sequence

BLOCK = 8
VOCABULARY = 32
CHECKSUM = SlotChecksum(slot_crc32c=9, page_crc32c=None)
ACCEPTED = AppendOutcome(error=None)


class Letters:
    """Token n is the n-th letter."""

    def decode_bytes(self, token_id: int) -> bytes:
        """One byte."""
        return bytes([65 + token_id])

    def is_special(self, token_id: int) -> bool:
        """None is."""
        return False


def sequence(
    *, prompt: int = 6, max_tokens: int = 20, spare: tuple[int, ...] = (1,), rows: int = 1
) -> Sequence:
    """A sequence with its first token, `rows` pages in its table and some spare ones."""
    rule = EndRule(end_token_ids=frozenset({31}), max_context=1000)
    parameters = SamplingParameters(temperature=0.0, max_tokens=max_tokens)
    output = OutputState(range(prompt), parameters, rule, Letters())
    first = output.take(SampledToken(token_id=3))
    table_rows = [
        PageRow(page=10 + i, page_generation=1, tokens=min(BLOCK, prompt - i * BLOCK))
        for i in range(rows)
    ]
    table = PageTable(table_rows, [GrantedPage(page=p, page_generation=1) for p in spare], BLOCK)
    return Sequence(
        request_id="r",
        log=HeldLog(log_id=bytes(16), generation=2),
        table=table,
        output=output,
        last_token_id=3,
        cached_tokens=0,
        exactness="exact",
        tokens_max=prompt + max_tokens,
        delivered=(first,),
    )


def produce(seq: Sequence, token_id: int = 4) -> OutputToken:
    """What the compute thread makes of a step: greedy on logits that favour `token_id`."""
    logits = np.zeros(VOCABULARY, np.float32)
    logits[token_id] = 5.0
    token = seq.output.choose(logits)
    seq.computed(token, CHECKSUM)
    return token


def test_a_step_consumes_the_newest_token_at_its_position() -> None:
    """KV of the newest token is not there yet: the step writes it and samples the next one."""
    step = sequence().next_step()
    assert step is not None
    assert (step.token_id, step.position, step.pages) == (3, 6, (10,))


def test_a_token_is_given_out_after_its_ack_only() -> None:
    """Not when it is computed, not when it is sent to the store."""
    seq = sequence()
    seq.next_step()
    produce(seq)
    assert seq.delivered_tokens == 1
    entry = seq.entry()
    assert entry is not None
    assert (entry.position, entry.sampled.token_id, entry.generation) == (7, 4, 2)
    assert entry.page.page == 10
    assert seq.delivered_tokens == 1
    produced = seq.acked(ACCEPTED)
    assert produced is not None
    assert (produced.token.index, produced.token.text) == (1, "E")
    assert seq.delivered_tokens == 2


def test_one_step_may_be_computed_ahead_of_the_ack_and_no_more() -> None:
    """Step k+1 runs while append k is unacked; its entry waits for that ack."""
    seq = sequence()
    seq.next_step()
    produce(seq)
    assert seq.entry() is not None
    ahead = seq.next_step()
    assert ahead is not None
    assert (ahead.token_id, ahead.position) == (4, 7)
    produce(seq, 5)
    assert seq.next_step() is None
    with pytest.raises(AssertionError):
        seq.entry()
    seq.acked(ACCEPTED)
    entry = seq.entry()
    assert entry is not None
    assert entry.position == 8


def test_nothing_is_computed_after_the_last_token() -> None:
    """A finish reason stops the machine at once; usage goes with the last token."""
    seq = sequence(max_tokens=2)
    seq.next_step()
    produce(seq)
    assert seq.next_step() is None
    entry = seq.entry()
    assert entry is not None
    assert (entry.finish_reason, entry.pages_wanted) == ("length", 0)
    assert seq.next_step() is None
    produced = seq.acked(ACCEPTED)
    assert produced is not None
    assert produced.usage is not None
    assert (produced.usage.prompt_tokens, produced.usage.completion_tokens) == (6, 2)
    assert seq.is_finished
    assert seq.next_step() is None


def test_a_refused_append_ends_the_sequence_without_a_token() -> None:
    """STALE_GENERATION: somebody else owns the log now."""
    seq = sequence()
    seq.next_step()
    produce(seq)
    seq.entry()
    stale = ServiceError(Reason.STALE_GENERATION, "another owner")
    assert seq.acked(AppendOutcome(error=stale)) is None
    assert seq.failure is stale
    assert seq.next_step() is None
    assert seq.delivered_tokens == 1


def test_the_first_cause_of_a_failure_stays() -> None:
    """What follows from it is not news."""
    seq = sequence()
    first = ServiceError(Reason.CANCELLED, "stop")
    seq.fail(first)
    seq.fail(ServiceError(Reason.INTERNAL, "later"))
    assert seq.failure is first


def test_pages_are_asked_for_half_a_page_ahead() -> None:
    """The next page is on its way while the current one still has room."""
    seq = sequence(spare=())
    seq.next_step()
    produce(seq)
    entry = seq.entry()
    assert entry is not None
    assert entry.pages_wanted == 1
    seq.acked(AppendOutcome(error=None, pages=(GrantedPage(page=20, page_generation=3),)))
    assert not seq.is_starved()
    step = seq.next_step()
    assert step is not None
    assert step.position == 7
    produce(seq)
    entry = seq.entry()
    assert entry is not None
    assert entry.pages_wanted == 0


def test_no_page_is_asked_for_that_the_answer_cannot_use() -> None:
    """Two tokens more need one slot more; the page has it."""
    seq = sequence(prompt=5, max_tokens=3, spare=())
    for _ in range(2):
        step = seq.next_step()
        assert step is not None
        produce(seq)
        entry = seq.entry()
        assert entry is not None
        assert entry.pages_wanted == 0
        seq.acked(ACCEPTED)
    assert seq.is_finished


def test_a_sequence_without_a_page_is_starved_until_it_gets_one() -> None:
    """It does not step, does not end, and says how much it needs."""
    seq = sequence(prompt=8, spare=())
    assert seq.next_step() is None
    assert seq.is_starved()
    assert seq.missing_pages() >= 1
    seq.table.grant([GrantedPage(page=30, page_generation=1)])
    assert not seq.is_starved()
    step = seq.next_step()
    assert step is not None
    assert step.pages == (10, 30)


def test_a_sequence_whose_ack_is_due_is_not_starved() -> None:
    """The ack may bring the page."""
    seq = sequence(prompt=7, spare=())
    assert seq.next_step() is not None
    produce(seq)
    seq.entry()
    assert seq.next_step() is None
    assert not seq.is_starved()
    seq.acked(ACCEPTED)
    assert seq.is_starved()


def test_a_gateway_that_comes_back_is_told_from_its_index_on() -> None:
    """Each token once: those it has are not repeated."""
    seq = sequence()
    for token_id in (4, 5):
        seq.next_step()
        produce(seq, token_id)
        seq.entry()
        seq.acked(ACCEPTED)
    assert [item.token.index for item in seq.delivered_from(1)] == [1, 2]
    assert [item.token.sampled.token_id for item in seq.delivered_from(2)] == [5]
    assert seq.delivered_from(3) == ()
