"""Small parts: events on the wire, error bodies, log probabilities, inboxes, limits, prefixes."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from baton.errors import REASONS, Reason, ServiceError
from baton.kv.digests import ids_hash, text_hash
from baton.kv.manifest import Segment
from baton.sampling_parameters import SamplingParameters
from baton.testing.clock import ManualClock
from services.gateway.events import FinishReason, Logprob, TokenDelta
from services.gateway.inbox import (
    BEHIND_S_MAX,
    EVENTS_MAX,
    SILENCE_MAX_S,
    Failed,
    Inbox,
    Lost,
    Token,
)
from services.gateway.limits import RequestLimits
from services.gateway.prefixes import (
    PrefixQuery,
    PublishedPrefix,
    ReadingRules,
    common_prefix,
    cut_to_blocks,
    match_prefix,
)
from services.gateway.prompts import resolve_sampling
from services.gateway.request import EncodedPrompt, Tenant
from services.gateway.rest.errors import answer_of
from services.gateway.rest.logprobs import CompletionLogprobs, chat_entry
from services.gateway.rest.sse import DONE, event


def test_event_is_one_line_of_strict_json() -> None:
    """Line ends inside text are escaped, characters stay UTF-8, infinities are refused."""
    assert event({"t": "a\n\u2028é"}) == 'data: {"t":"a\\n\u2028é"}\n\n'.encode()
    assert DONE == b"data: [DONE]\n\n"
    with pytest.raises(ValueError):
        event({"x": math.inf})


@pytest.mark.parametrize("reason", list(Reason))
def test_every_reason_has_an_openai_body_and_honest_retry_headers(reason: Reason) -> None:
    """Clients retry 429 and 5xx on their own unless told not to."""
    answer = answer_of(ServiceError(reason, "text", field="f", retry_after_s=0.2))
    row = REASONS[reason]
    assert answer.status == row.http_status
    assert json.loads(answer.content)["error"] == {
        "message": "text",
        "type": row.openai_type,
        "param": "f",
        "code": row.openai_code,
    }
    if answer.status in (429, 503):
        assert answer.headers["retry-after"] == "1"
    if answer.status >= 500 or answer.status in (409, 429):
        assert answer.headers["x-should-retry"] == ("true" if row.retryable else "false")
    assert ("www-authenticate" in answer.headers) == (reason is Reason.UNAUTHENTICATED)


def test_logprob_bytes_rebuild_text_that_no_token_holds_alone() -> None:
    """An emoji of two tokens: U+FFFD in `token`, the truth in `bytes`."""
    halves = [bytes([32, 240, 159, 152]), bytes([128])]
    entries = [chat_entry(Logprob(token_id=1, logprob=-1.0, token_bytes=b)) for b in halves]
    assert bytes(sum((one["bytes"] for one in entries), [])).decode() == " 😀"  # noqa: RUF017  # two


class Tokens:
    """A vocabulary of a split emoji, a letter and a control token."""

    table = (b" \xf0\x9f\x98", b"\x80", b"a", b"<|end|>")

    def decode_bytes(self, token_id: int) -> bytes:
        return self.table[token_id]

    def is_special(self, token_id: int) -> bool:
        return token_id == 3


def test_text_offsets_count_characters_of_the_text() -> None:
    """A split character counts once; a control token, which the text leaves out, not at all."""
    lists = CompletionLogprobs(False, Tokens())
    assert lists.echo([2, 0, 1])["text_offset"] == [0, 1, 2]
    entries = [
        Logprob(token_id=one, logprob=-1.0, token_bytes=Tokens.table[one]) for one in (0, 1, 3, 2)
    ]
    assert lists.of(entries)["text_offset"] == [3, 4, 5, 5]


def test_impossible_alternatives_are_written_as_the_reference_does() -> None:
    """JSON has no infinity; of two alternatives that read alike the likelier stays."""
    top = tuple(
        Logprob(token_id=i, logprob=lp, token_bytes=b)
        for i, (lp, b) in enumerate([(-0.1, b"\xff"), (-2.0, b"\xfe"), (-math.inf, b"x")])
    )
    entry = Logprob(token_id=1, logprob=-math.inf, token_bytes=b"a", top=top)
    lists = CompletionLogprobs(True, Tokens()).of([entry])
    assert lists["token_logprobs"] == [-9999.0]
    assert lists["top_logprobs"] == [{"\ufffd": -0.1, "x": -9999.0}]


def token(index: int, finish: FinishReason | None = None) -> Token:
    delta = TokenDelta(index=index, token_id=1, text="x", finish=finish)
    return Token(delta=delta, usage=None)


async def test_reader_that_is_too_many_events_behind_is_detached() -> None:
    """One slow client never holds the stream of all; it hears why."""
    inbox = Inbox(ManualClock())
    assert all(inbox.put(token(index)) for index in range(EVENTS_MAX))
    assert not inbox.put(token(EVENTS_MAX))
    event_ = await inbox.get()
    assert isinstance(event_, Failed)
    assert "behind" in event_.error.message
    assert inbox.is_closed
    assert inbox.put(token(0))


async def test_reader_that_is_too_long_behind_is_detached() -> None:
    """Time counts as well as number."""
    clock = ManualClock()
    inbox = Inbox(clock)
    assert inbox.put(token(0))
    clock.advance(BEHIND_S_MAX + 0.1)
    assert not inbox.put(token(1))


async def test_a_sequence_that_its_worker_says_nothing_of_is_overdue() -> None:
    """Before the first event as long as was given, later the silence that no pause reaches."""
    clock = ManualClock()
    inbox = Inbox(clock, start_s_max=5.0)

    def overdue() -> bool:
        return inbox.is_overdue

    clock.advance(5.0)
    assert not overdue()
    clock.advance(0.1)
    assert overdue()
    inbox.put(token(0))
    clock.advance(SILENCE_MAX_S)
    assert not overdue()
    clock.advance(0.1)
    assert overdue()
    inbox.put(token(1, FinishReason.STOP))
    clock.advance(2 * SILENCE_MAX_S)
    assert not overdue(), "it has ended"


async def test_nothing_comes_after_a_terminal_event() -> None:
    """The last token, a failure or a loss closes the box."""
    for last in (token(0, FinishReason.STOP), Lost(why="x", since_s=0.0)):
        inbox = Inbox(ManualClock())
        inbox.put(last)
        inbox.put(token(1))
        assert await inbox.get() == last
        assert inbox.is_closed


def test_slots_are_given_back_however_the_block_ends() -> None:
    """At the limit it fits, one past it does not; 429 for a tenant, 503 for all."""
    limits = RequestLimits(sequences_max=3, tenant_sequences_max=2)
    with limits.admitted("a", 2):
        with pytest.raises(ServiceError) as over_share, limits.admitted("a", 1):
            pass
        assert over_share.value.reason is Reason.QUOTA_EXCEEDED
        with limits.admitted("b", 1):
            with pytest.raises(ServiceError) as full, limits.admitted("c", 1):
                pass
            assert full.value.reason is Reason.QUEUE_FULL
    with pytest.raises(RuntimeError), limits.admitted("a", 2):
        raise RuntimeError
    assert (limits.running, limits.of("a")) == (0, 0)


PROMPT = EncodedPrompt(token_ids=tuple(range(20)), rendered=bytes(range(40)))


def prefix(tokens: int, **more: object) -> PublishedPrefix:
    segment = Segment(
        log_id=bytes(15) + bytes([tokens]),
        generation=1,
        from_position=0,
        to_position=tokens,
        history_start=bytes(32),
        history_end=bytes(32),
        kv_digest=bytes(16),
        tokenizer_hash=bytes(8),
        block_tokens=8,
        numeric_class_id=1,
        text_hash=text_hash(PROMPT.rendered[: 2 * tokens]),
        ids_hash=ids_hash(PROMPT.token_ids[:tokens]),
    )
    values: dict[str, object] = {
        "prefix_id": f"p{tokens}",
        "name": "n",
        "segment": segment,
        "text_bytes": 2 * tokens,
        "template_digest": b"t",
        "owner_tenant": "owner",
        "tenants": (),
        "model": "m",
        "create_wall_s": 0.0,
        "expire_wall_s": None,
        "hits": 0,
        "kvstore_address": "s",
    }
    return PublishedPrefix(**{**values, **more})  # type: ignore[arg-type]  # filled above


QUERY = PrefixQuery(
    prompt=PROMPT,
    tenant="owner",
    rules=ReadingRules(tokenizer_hash=bytes(8), template_digest=b"t"),
    kv_digest=bytes(16),
    kvstore_address="s",
    now_wall_s=100.0,
)


def matched(prefixes: list[PublishedPrefix], query: PrefixQuery = QUERY) -> str | None:
    found = match_prefix(prefixes, query)
    return None if found is None else found.prefix.prefix_id


def test_longest_true_prefix_wins_and_one_token_stays_outside() -> None:
    """Prefill needs something to compute."""
    assert matched([prefix(8), prefix(16)]) == "p16"
    short = replace(QUERY, prompt=EncodedPrompt(token_ids=tuple(range(16)), rendered=bytes(40)))
    assert matched([prefix(16)], short) is None


def test_both_hashes_must_agree() -> None:
    """Same ids with other bytes, or same bytes with other ids, is no match."""
    other_text = replace(QUERY, prompt=replace(PROMPT, rendered=b"x" * 40))
    assert matched([prefix(8), prefix(16)], other_text) is None
    ids = (*range(10), 99, *range(11, 20))
    late = replace(QUERY, prompt=replace(PROMPT, token_ids=ids))
    assert matched([prefix(8), prefix(16)], late) == "p8"
    swapped = replace(PROMPT, token_ids=(5, *range(1, 20)))
    assert matched([prefix(8)], replace(QUERY, prompt=swapped)) is None


@pytest.mark.parametrize(
    "more",
    [
        {"expire_wall_s": 100.0},
        {"template_digest": b"other"},
        {"segment": replace(prefix(8).segment, tokenizer_hash=b"another!")},
        {"kvstore_address": "elsewhere"},
        {"owner_tenant": "someone", "tenants": ("else",)},
    ],
)
def test_prefix_that_is_not_for_this_request_is_not_used(more: dict[str, object]) -> None:
    """Over, of another template, at another store, or for others."""
    assert matched([prefix(8, **more)]) is None


def test_grants_are_by_name_or_for_all() -> None:
    """The owner needs none."""
    for tenants in (("owner",), ("*",)):
        assert matched([prefix(8, owner_tenant="x", tenants=tenants)]) == "p8"
    other_kv = replace(QUERY, kv_digest=b"k" * 16)
    assert matched([prefix(8)], other_kv) is None


def test_prefix_is_cut_where_continuations_agree_and_blocks_end() -> None:
    """Tokens that a later turn could change stay outside."""
    one = EncodedPrompt(token_ids=(1, 2, 3, 4, 5), rendered=b"")
    other = EncodedPrompt(token_ids=(1, 2, 3, 9), rendered=b"")
    assert common_prefix(one, other) == (1, 2, 3)
    cut = cut_to_blocks((1, 2, 3, 4, 5), 2, lambda item: bytes([item]) * item)
    assert cut == EncodedPrompt(token_ids=(1, 2, 3, 4), rendered=b"\1\2\2\3\3\3\4\4\4\4")


def test_context_is_checked_and_the_rest_resolved() -> None:
    """Never cut; without max_tokens the room left is the limit."""
    plain = SamplingParameters()
    resolved = resolve_sampling(plain, prompt_tokens=90, context_max=100, seed=5)
    assert (resolved.max_tokens, resolved.seed) == (10, 5)
    given_ = SamplingParameters(max_tokens=10, seed=1)
    assert resolve_sampling(given_, prompt_tokens=90, context_max=100, seed=5) == given_
    for prompt_tokens, sampling in ((100, plain), (91, given_)):
        with pytest.raises(ServiceError) as refused:
            resolve_sampling(sampling, prompt_tokens=prompt_tokens, context_max=100, seed=5)
        assert refused.value.reason is Reason.PROMPT_TOO_LONG


def test_salts_only_narrow_and_long_ones_are_hashed() -> None:
    """A body can never name another tenant's scope."""
    tenant = Tenant(name="a", team="t")
    assert tenant.scope(None) != tenant.scope("s")
    assert tenant.scope("s") != tenant.scope("s2")
    assert tenant.scope("x" * 1024).cache_salt != tenant.scope("x" * 1023).cache_salt
    assert tenant.scope("s").tenant == "a"
