"""Page tables in columns: they read as a list of rows, and a fork's table is its own."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.kvstore.rows import PageRow, Rows, cut_row

BLOCK = 8


def table(blocks: int, tail: int) -> list[PageRow]:
    """Full rows and, with `tail` slots, a partial one."""
    rows = [
        PageRow(page=100 + at, page_generation=3 + at, tokens=BLOCK, crc=at + 1)
        for at in range(blocks)
    ]
    if tail:
        crcs = list(range(50, 50 + tail))
        rows.append(PageRow(page=7, page_generation=9, tokens=tail, slot_crcs=crcs))
    return rows


def cut(rows: list[PageRow], tokens: int) -> list[PageRow]:
    """The model of a cut: the rows of the first tokens, the last one shortened."""
    count = -(-tokens // BLOCK)
    kept = rows[:count]
    if kept and tokens - (count - 1) * BLOCK < kept[-1].tokens:
        kept[-1] = cut_row(kept[-1], tokens - (count - 1) * BLOCK)
    return kept


tables = st.builds(table, st.integers(0, 6), st.integers(0, BLOCK - 1))


@given(tables, st.integers(-8, 8), st.integers(-8, 8))
def test_rows_read_as_a_list(model: list[PageRow], first: int, end: int) -> None:
    """Lengths, indexes from both ends, slices, iteration, page numbers."""
    rows = Rows(model)
    assert rows == model
    assert list(reversed(rows)) == model[::-1]
    assert rows[first:end] == model[first:end]
    assert [rows[at] for at in range(-len(model), len(model))] == [*model, *model]
    assert rows.pages().tolist() == [row.page for row in model]
    columns = rows.columns()
    assert columns.crcs.tolist() == [row.crc for row in model[:-1]]
    full = [row for row in model if row.crc is not None]
    last = model[-1] if len(full) < len(model) else None
    made = Rows.of_columns(
        [r.page for r in full],
        [r.page_generation for r in full],
        [r.crc or 0 for r in full],
        BLOCK,
        last,
    )
    assert made == model


@given(tables, st.data())
def test_head_is_the_first_positions_and_its_own(model: list[PageRow], data: st.DataObject) -> None:
    """A fork at any position, and neither branch sees what the other one appends or cuts."""
    rows = Rows(model)
    held = sum(row.tokens for row in model)
    position = data.draw(st.integers(0, held))
    head = rows.head(position, BLOCK)
    assert head == cut(list(model), position)
    if head.last is not None and head.last.crc is None:
        head.last.slot_crcs.append(1)
        head.last.tokens += 1
    assert rows == model
    gone = head.cut(0, BLOCK)
    assert len(gone) == -(-position // BLOCK)
    assert head == []


@given(tables, st.data())
def test_cut_keeps_the_first_positions_and_names_the_pages_that_go(
    model: list[PageRow], data: st.DataObject
) -> None:
    """Truncating in place is the model's cut; the table goes on behind it."""
    rows = Rows(model)
    held = sum(row.tokens for row in model)
    position = data.draw(st.integers(0, held))
    gone = rows.cut(position, BLOCK)
    kept = cut(list(model), position)
    assert rows == kept
    assert gone.tolist() == [row.page for row in model[len(kept) :]]
    if position % BLOCK == 0:
        rows.append(PageRow(page=1, page_generation=1, tokens=1, slot_crcs=[4]))
        assert rows[-1].page == 1
        assert len(rows) == len(kept) + 1


def test_row_that_is_being_filled_gets_its_crc_in_every_table_that_shares_it() -> None:
    """A copied full page's CRC is known when the copy is done; forks made before it see it too."""
    rows = Rows()
    fresh = PageRow(page=1, page_generation=1, tokens=BLOCK)
    rows.append(fresh, is_filling=True)
    rows.append(PageRow(page=2, page_generation=1, tokens=BLOCK, crc=5))
    rows.append(PageRow(page=3, page_generation=1, tokens=1, slot_crcs=[6]))
    head = rows.head(BLOCK + 2, BLOCK)
    assert (rows.known(), head.known()) == (0, 0)
    fresh.crc = 77
    assert (rows.known(), head.known()) == (3, 2)
    assert rows[0].crc == head[0].crc == 77
    assert rows.columns().crcs.tolist() == [77, 5]
    rows[0] = PageRow(page=9, page_generation=2, tokens=BLOCK, crc=8)
    assert (rows[0].page, rows[0].crc) == (9, 8)
