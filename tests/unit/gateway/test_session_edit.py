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


WIDE = (
    ChatTurn(role=Role.SYSTEM, content="你是一个简洁的助手。"),
    ChatTurn(role=Role.USER, content="我家有👩‍👩‍👧‍👦和🐱,巴黎在哪里?é e\u0301"),
    ChatTurn(role=Role.ASSISTANT, content="在法国 🇫🇷。"),
)
"""Three bytes a character, four, several code points that are one sign, two spellings of é."""


@pytest.mark.parametrize(
    ("index", "start", "end", "text", "content"),
    [
        (1, "巴黎", None, "罗马", "我家有👩‍👩‍👧‍👦和🐱,罗马在哪里?é e\u0301"),
        (1, "👩‍👩‍👧‍👦", None, "🐶", "我家有🐶和🐱,巴黎在哪里?é e\u0301"),
        (1, "👧", None, "👦", "我家有👩‍👩‍👦‍👦和🐱,巴黎在哪里?é e\u0301"),
        (1, "和🐱", "在哪", "🦊", "我家有👩‍👩‍👧‍👦🦊里?é e\u0301"),
        (1, "é", None, "è", "我家有👩‍👩‍👧‍👦和🐱,巴黎在哪里?è e\u0301"),
        (1, "e\u0301", None, "", "我家有👩‍👩‍👧‍👦和🐱,巴黎在哪里?é "),
        (2, "🇫🇷", None, "🇮🇹", "在法国 🇮🇹。"),
        (0, "简洁的", None, "", "你是一个助手。"),
    ],
)
def test_text_anchors_hold_in_every_script(
    model: ServedModel, index: int, start: str, end: str | None, text: str, content: str
) -> None:
    """To the character, as tokenising the whole new conversation would have it."""
    order = EditOrder(
        start=Anchor(text=start), end=None if end is None else Anchor(text=end), text=text
    )
    turn = ChatTurn(role=WIDE[index].role, content=content)
    want = ids_of(model, (*WIDE[:index], turn, *WIDE[index + 1 :]))
    assert edited(model, ids_of(model, WIDE), order) == want


def test_every_byte_of_a_message_is_an_edge_or_says_where_the_edges_are(
    model: ServedModel,
) -> None:
    """What is inserted at an edge stands there; inside a character nothing is."""
    ids, content = ids_of(model, WIDE), WIDE[1].content
    edges = [len(content[:at].encode()) for at in range(len(content) + 1)]
    for byte in range(len(content.encode()) + 1):
        order = EditOrder(start=Anchor(message=1, byte=byte), end=None, text="+")
        if byte in edges:
            at = edges.index(byte)
            turn = ChatTurn(role=Role.USER, content=f"{content[:at]}+{content[at:]}")
            assert edited(model, ids, order) == ids_of(model, (WIDE[0], turn, WIDE[2]))
            continue
        with pytest.raises(ServiceError) as caught:
            edited(model, ids, order)
        before = max(edge for edge in edges if edge < byte)
        behind = min(edge for edge in edges if edge > byte)
        assert caught.value.field == "start"
        assert caught.value.message.endswith(f"the character's edge, {before} or {behind}")


def test_token_ids_come_exactly_where_they_are_put(model: ServedModel) -> None:
    """Every range of a history, by token."""
    ids = ids_of(model, TURNS)
    for start in range(len(ids) + 1):
        for end in range(start, len(ids) + 1):
            order = EditOrder(start=Anchor(token=start), end=Anchor(token=end), token_ids=(5, 6))
            assert edited(model, ids, order) == (*ids[:start], 5, 6, *ids[end:])


@pytest.mark.parametrize(
    ("order", "field", "remedy"),
    [
        (EditOrder(start=Anchor(token=4), end=Anchor(token=2), text=""), "start", "swap the two"),
        (EditOrder(start=Anchor(token=4), end=Anchor(token=4000), text=""), "end", "give 0 to"),
        (EditOrder(start=Anchor(token=4), end=Anchor(message=1), text=""), "end",
         "of the same kind as start"),
        (EditOrder(start=Anchor(text="nowhere"), end=None, text=""), "start",
         "as reading the session shows it"),
        (EditOrder(start=Anchor(text="l"), end=None, text=""), "start",
         "give more of what is around it"),
        (EditOrder(start=Anchor(text=""), end=None, text=""), "start", "give what stands there"),
        (EditOrder(start=Anchor(text="Yes"), end=Anchor(text="terse"), text=""), "end",
         "edit within one message"),
        (EditOrder(start=Anchor(text="world"), end=Anchor(text="🍎"), text=""), "start",
         "swap the two"),
        (EditOrder(start=Anchor(message=1, byte=2), end=None, text=""), "start",
         "the character's edge, 1 or 3"),
        (EditOrder(start=Anchor(message=1, byte=99), end=None, text=""), "start", "give 0 to 28"),
        (EditOrder(start=Anchor(message=7), end=None, text=""), "start", "give 0 to 2"),
        (EditOrder(start=Anchor(message=7), end=Anchor(message=8), turns=()), "start",
         "give 0 to 3"),
        (EditOrder(start=Anchor(message=2), end=Anchor(message=1), turns=()), "start",
         "swap the two"),
        (EditOrder(start=Anchor(message=1), end=Anchor(message=2), text="x"), "replacement",
         "leave end out"),
        (EditOrder(start=Anchor(token=1), end=None, token_ids=(1 << 30,)),
         "replacement.token_ids[0]", "must be a token id below"),
        (EditOrder(start=Anchor(text="Yes"), end=None, token_ids=(1,)), "replacement",
         "only where start and end are token positions"),
    ],
)  # fmt: skip
def test_a_bad_range_is_refused_naming_its_end_and_what_to_do(
    model: ServedModel, order: EditOrder, field: str, remedy: str
) -> None:
    """Behind the end, turned round, not found, found twice, inside a character."""
    with pytest.raises(ServiceError) as caught:
        edited(model, ids_of(model, TURNS), order)
    assert caught.value.field == field
    assert remedy in caught.value.message, caught.value.message


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
