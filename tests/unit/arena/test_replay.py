"""The fold of a replay: a view is whole and consistent, or there is none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.arena.replay import (
    GrantedPage,
    LogHead,
    PageRow,
    PageRun,
    ReplayEnd,
    ReplayPiece,
    TokenRun,
    fold_replay,
)
from baton.errors import Reason, ServiceError
from baton.sampling_parameters import SamplingParameters

BLOCK = 8
HEAD = LogHead(
    log_id=bytes(15) + b"\1",
    generation=3,
    position=12,
    prompt_tokens=11,
    committed_position=11,
    cached_tokens=8,
    is_sealed=True,
    sampling=SamplingParameters(),
    granted_pages=(GrantedPage(page=7, page_generation=2),),
)
FULL = PageRow(page=4, page_generation=1, tokens=8, crc32c=5)
PARTIAL = PageRow(page=5, page_generation=1, tokens=3, slot_crcs=(1, 2, 3))


def pieces(head: LogHead = HEAD) -> list[ReplayPiece]:
    """A replay in two token runs and two page runs."""
    return [
        head,
        TokenRun(first_position=0, token_ids=tuple(range(9))),
        TokenRun(first_position=9, token_ids=(9, 10, 11)),
        PageRun(first_index=0, rows=(FULL,)),
        PageRun(first_index=1, rows=(PARTIAL,)),
        ReplayEnd(lsn=99),
    ]


def test_pieces_fold_into_one_view() -> None:
    """Runs are joined in order, and the prompt is told from the output."""
    view = fold_replay(pieces(), BLOCK)
    assert view.token_ids == tuple(range(12))
    assert view.prompt_ids == tuple(range(11))
    assert view.output_ids == (11,)
    assert view.rows == (FULL, PARTIAL)
    assert view.lsn == 99
    assert view.head.held.generation == 3


def test_a_log_without_kv_has_no_rows() -> None:
    """A fresh log is a head, its prompt and an end."""
    head = replace(HEAD, position=2, prompt_tokens=2, committed_position=0, cached_tokens=0)
    view = fold_replay(
        [head, TokenRun(first_position=0, token_ids=(1, 2)), ReplayEnd(lsn=1)], BLOCK
    )
    assert view.rows == ()
    assert view.output_ids == ()


@pytest.mark.parametrize(
    ("broken", "what"),
    [
        (pieces()[1:], "no head"),
        (pieces()[:-1], "no end"),
        ([HEAD, *pieces()], "second head"),
        ([*pieces(), TokenRun(first_position=12, token_ids=(1,))], "after the end"),
        ([p for p in pieces() if p != pieces()[1]], "tokens continue at 9"),
        ([p for p in pieces() if p != pieces()[3]], "page rows continue at 1"),
        (pieces(replace(HEAD, position=13)), "12 tokens of 13"),
        (pieces(replace(HEAD, prompt_tokens=0)), "a prompt of 0"),
        (pieces(replace(HEAD, prompt_tokens=13)), "a prompt of 13"),
        (pieces(replace(HEAD, committed_position=13)), "KV for 13"),
        (pieces(replace(HEAD, committed_position=10)), "pages for 11 of 10"),
    ],
)
def test_what_does_not_fit_together_is_refused(broken: list[ReplayPiece], what: str) -> None:
    """A view built from such pieces would be continued wrongly."""
    with pytest.raises(ServiceError) as caught:
        fold_replay(broken, BLOCK)
    assert caught.value.reason is Reason.LOG_CORRUPT
    assert what in caught.value.message


def test_a_partial_page_in_the_middle_is_refused() -> None:
    """Only the last row may be partial, or positions and rows no longer correspond."""
    swapped = [
        HEAD,
        TokenRun(first_position=0, token_ids=tuple(range(12))),
        PageRun(first_index=0, rows=(PARTIAL, FULL)),
        ReplayEnd(lsn=1),
    ]
    with pytest.raises(ServiceError) as caught:
        fold_replay(swapped, BLOCK)
    assert "partial page before" in caught.value.message


@pytest.mark.parametrize("tokens", [0, 9])
def test_a_last_page_of_impossible_size_is_refused(tokens: int) -> None:
    """A page holds 1 to block_tokens tokens."""
    bad = [
        HEAD,
        TokenRun(first_position=0, token_ids=tuple(range(12))),
        PageRun(first_index=0, rows=(FULL, replace(PARTIAL, tokens=tokens))),
        ReplayEnd(lsn=1),
    ]
    with pytest.raises(ServiceError) as caught:
        fold_replay(bad, BLOCK)
    assert "last page" in caught.value.message
