"""Token ids in shared pieces: they read, grow and are cut as a list, and forks do not meet."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.kvstore import tokens as module
from services.kvstore.tokens import Tokens

PIECE = 4


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of four ids, so that short lists have several."""
    monkeypatch.setattr(module, "PIECE", PIECE)


step = st.one_of(
    st.tuples(st.just("append"), st.integers(0, 9)),
    st.tuples(st.just("extend"), st.lists(st.integers(0, 9), max_size=11)),
    st.tuples(st.just("cut"), st.integers(0, 20)),
    st.tuples(st.just("fork"), st.integers(0, 20)),
)


@given(st.lists(step, max_size=25))
@settings(deadline=None)
def test_tokens_are_a_list_and_forks_keep_theirs(script: list[tuple[str, object]]) -> None:
    """After any steps every branch is what its list is."""
    branches: list[tuple[Tokens, list[int]]] = [(Tokens(), [])]
    for at, (name, value) in enumerate(script):
        ids, model = branches[at % len(branches)]
        if name == "append" and isinstance(value, int):
            ids.append(value)
            model.append(value)
        elif name == "extend" and isinstance(value, list):
            ids.extend(value)
            model.extend(value)
        elif name == "cut" and isinstance(value, int):
            del ids[value:]
            del model[value:]
        elif isinstance(value, int):
            count = min(value, len(model))
            branches.append((ids.head(count), model[:count]))
        for one, expected in branches:
            assert list(one) == expected
            assert one == expected


@given(st.lists(st.integers(0, 9), max_size=20), st.integers(-22, 22), st.integers(-22, 22))
@settings(deadline=None)
def test_slices_indexes_and_beginnings_are_those_of_a_list(
    model: list[int], first: int, end: int
) -> None:
    """From both ends, across pieces."""
    ids = Tokens(model)
    assert ids[first:end].tolist() == model[first:end]
    assert [ids[at] for at in range(-len(model), len(model))] == [*model, *model]
    with pytest.raises(IndexError):
        ids[len(model)]
    with pytest.raises(IndexError):
        ids[-len(model) - 1]
    count = min(abs(first), len(model))
    assert ids.begins_with(model[:count])
    assert not ids.begins_with([*model, 1])
    if count:
        other = [*model[: count - 1], model[count - 1] + 1]
        assert not ids.begins_with(other)
