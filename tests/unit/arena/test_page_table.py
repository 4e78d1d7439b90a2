"""The writer's page table: rows in order, never changed, and what to ask for."""

from __future__ import annotations

import pytest

from baton.arena.page_table import PageTable
from baton.arena.replay import GrantedPage, PageRow
from baton.errors import Reason, ServiceError

BLOCK = 8


def granted(*pages: int) -> tuple[GrantedPage, ...]:
    """Pages under page generation 1."""
    return tuple(GrantedPage(page=page, page_generation=1) for page in pages)


def test_granted_pages_become_rows_in_order() -> None:
    """The first spare page continues where the committed rows end."""
    table = PageTable([PageRow(page=9, page_generation=4, tokens=3)], granted(5, 2), BLOCK)
    assert table.capacity == 24
    assert table.reach(20)
    assert table.pages(20) == [9, 5, 2]
    assert table.pages(8) == [9]
    assert table.slot(3) == (GrantedPage(page=9, page_generation=4), 3)
    assert table.slot(8) == (GrantedPage(page=5, page_generation=1), 0)
    assert table.row_count == 3


def test_reach_beyond_the_pages_changes_nothing() -> None:
    """A refused reach must not use up spare pages."""
    table = PageTable([], granted(1), BLOCK)
    assert not table.reach(9)
    assert table.row_count == 0
    assert table.reach(8)


def test_require_names_what_is_missing() -> None:
    """PAGES_EXHAUSTED carries both numbers and a time to come back."""
    with pytest.raises(ServiceError) as caught:
        PageTable([], granted(1), BLOCK).require(9)
    assert caught.value.reason is Reason.PAGES_EXHAUSTED
    assert caught.value.metadata == {"capacity": "8", "needed": "9"}
    assert caught.value.retry_after_s is not None


def test_a_repeated_grant_adds_nothing() -> None:
    """The same pages come in Take's answer and in the replayed head."""
    table = PageTable([], granted(1, 2), BLOCK)
    table.grant(granted(2, 1))
    table.reach(8)
    table.grant(granted(1))
    assert table.capacity == 16


@pytest.mark.parametrize(
    ("position", "ahead", "expected"), [(0, 8, 0), (8, 1, 1), (7, 9, 1), (7, 10, 2), (3, 0, 0)]
)
def test_missing_pages_rounds_up(position: int, ahead: int, expected: int) -> None:
    """What is asked for covers the positions ahead, not one page more."""
    assert PageTable([], granted(1), BLOCK).missing_pages(position, ahead) == expected


def test_a_spare_page_is_one_that_is_no_row() -> None:
    """Scratch computation must never touch a row."""
    table = PageTable([], granted(1, 2), BLOCK)
    table.reach(8)
    assert table.spare_page() == 2
    table.reach(16)
    with pytest.raises(ServiceError):
        table.spare_page()
