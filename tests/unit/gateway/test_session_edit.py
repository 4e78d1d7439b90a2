"""Edits of a history's tokens: equal to tokenising the whole new conversation."""

from __future__ import annotations

import pytest

from baton.errors import ServiceError
from baton.testing.tiny_models import TinyModel, write_directory
from services.gateway.__main__ import load_model
from services.gateway.prompts import ServedModel
from services.gateway.request import ChatPrompt, ChatTurn, Role
from services.gateway.session_edit import Anchor, EditOrder, change_of, edited
from services.gateway.session_text import History, next_turn

TURNS = (
    ChatTurn(role=Role.SYSTEM, content="Be terse."),
    ChatTurn(role=Role.USER, content="Héllo 🍎 <|im_end|> world"),
    ChatTurn(role=Role.ASSISTANT, content="Yes."),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    """The tiny model's tokenizer and chat template."""
    return load_model(str(write_directory(tmp_path_factory.mktemp("model"), TinyModel())))


def ids_of(model: ServedModel, turns: tuple[ChatTurn, ...]) -> tuple[int, ...]:
    """A whole conversation, tokenised at once."""
    return model.encode_turns(ChatPrompt(turns=turns, has_assistant_header=False))


def with_content(index: int, content: str) -> tuple[ChatTurn, ...]:
    """The turns with another content of one."""
    changed = ChatTurn(role=TURNS[index].role, content=content)
    return (*TURNS[:index], changed, *TURNS[index + 1 :])


def test_a_history_shows_the_turns_that_were_rendered(model: ServedModel) -> None:
    """What spells a control token inside a content divides nothing."""
    assert tuple(History(model, ids_of(model, TURNS)).chat()) == TURNS


def test_a_history_without_turns_has_none(model: ServedModel) -> None:
    """Raw token ids, as a completion's, follow no template: they are read and edited by token."""
    assert History(model, (7, 8, 9)).chat() == []


@pytest.mark.parametrize(
    ("order", "turns"),
    [
        (EditOrder(start=Anchor(text="🍎"), end=None, text="🍐🍐"),
         with_content(1, "Héllo 🍐🍐 <|im_end|> world")),
        (EditOrder(start=Anchor(text="Héllo"), end=Anchor(text="world"), text="<|im_start|>"),
         with_content(1, "<|im_start|>")),
        (EditOrder(start=Anchor(message=0), end=None, text="Be kind."),
         with_content(0, "Be kind.")),
        (EditOrder(start=Anchor(message=1, byte=6), end=None, text=", dear"),
         with_content(1, "Héllo, dear 🍎 <|im_end|> world")),
        (EditOrder(start=Anchor(message=1), end=Anchor(message=3), turns=()), TURNS[:1]),
        (EditOrder(start=Anchor(message=1), end=Anchor(message=1), turns=(TURNS[1],)),
         (TURNS[0], TURNS[1], *TURNS[1:])),
    ],
)  # fmt: skip
def test_an_edit_equals_tokenising_the_new_conversation(
    model: ServedModel, order: EditOrder, turns: tuple[ChatTurn, ...]
) -> None:
    """By text, by message, by byte: replaced, inserted, deleted."""
    assert edited(model, ids_of(model, TURNS), order) == ids_of(model, turns)


def test_token_ids_come_exactly_where_they_are_put(model: ServedModel) -> None:
    """Every range of a history, by token."""
    ids = ids_of(model, TURNS)
    for start in range(len(ids) + 1):
        for end in range(start, len(ids) + 1):
            order = EditOrder(start=Anchor(token=start), end=Anchor(token=end), token_ids=(5, 6))
            assert edited(model, ids, order) == (*ids[:start], 5, 6, *ids[end:])


@pytest.mark.parametrize(
    ("order", "field"),
    [
        (EditOrder(start=Anchor(token=4), end=Anchor(token=2), text=""), "start"),
        (EditOrder(start=Anchor(token=4), end=Anchor(token=4000), text=""), "end"),
        (EditOrder(start=Anchor(token=4), end=Anchor(message=1), text=""), "end"),
        (EditOrder(start=Anchor(text="nowhere"), end=None, text=""), "start"),
        (EditOrder(start=Anchor(text="l"), end=None, text=""), "start"),
        (EditOrder(start=Anchor(text="Yes"), end=Anchor(text="terse"), text=""), "end"),
        (EditOrder(start=Anchor(message=1, byte=2), end=None, text=""), "start"),
        (EditOrder(start=Anchor(message=7), end=None, text=""), "start"),
        (EditOrder(start=Anchor(token=1), end=None, token_ids=(1 << 30,)),
         "replacement.token_ids[0]"),
        (EditOrder(start=Anchor(text="Yes"), end=None, token_ids=(1,)), "replacement"),
    ],
)  # fmt: skip
def test_a_bad_range_is_refused_naming_its_end(
    model: ServedModel, order: EditOrder, field: str
) -> None:
    """Behind the end, turned round, not found, found twice, inside a character."""
    with pytest.raises(ServiceError) as caught:
        edited(model, ids_of(model, TURNS), order)
    assert caught.value.field == field


def test_a_next_turn_keeps_every_id_and_reads_as_the_whole_conversation(
    model: ServedModel,
) -> None:
    """Whether the answer ended with its end token, was cut, or stands rendered whole."""
    asked = model.encode_turns(ChatPrompt(turns=TURNS[:2]))
    more = ChatTurn(role=Role.USER, content="More")
    want = model.encode_turns(ChatPrompt(turns=(*TURNS, more)))
    answer = (*asked, *model.tokenizer.encode("Yes."))
    for history in (answer, (*answer, *model.tokenizer.eos_ids[:1]), ids_of(model, TURNS)):
        assert next_turn(model, history, [more], has_header=True) == want
    assert next_turn(model, asked, [], has_header=True) == asked


def test_a_change_is_the_smallest_range_that_explains_it() -> None:
    """What both histories begin and end with was neither dropped nor inserted."""
    change = change_of((1, 2, 3, 4, 5), (1, 2, 9, 9, 4, 5))
    assert (change.common, change.dropped, change.inserted) == (2, 1, 2)
    same = change_of((1, 2), (1, 2))
    assert (same.common, same.dropped, same.inserted) == (2, 0, 0)
