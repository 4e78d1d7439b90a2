"""Write golden/token_ids.json: texts and the ids that transformers' GGUF conversion gives them.

Run by hand, `python tests/unit/text/make_golden.py`, when the bundled model changes; commit a
difference only if you can explain it. Also the one place that lists the texts (`TEXTS`).
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).parent / "golden" / "token_ids.json"

TEXTS = (
    "",
    " ",
    "  ",
    "\n",
    "\n\n\n\n",
    "\r\n\r\n",
    "\t\tx",
    "a",
    "hi",
    "Hello",
    "Hello, world!",
    "The capital of France is",
    "1 2 3 4 5 6 7 8 9 10 11 12",
    "In 1984, 3.14159 and 2,718,281.",
    "a  1",
    "  42",
    "x\n 1",
    "def f(x):\n    return x ** 2\n\n\nprint(f(3))\n",
    "for (int i = 0; i < n; ++i) { sum += a[i]; }",
    "SELECT * FROM t WHERE id = 'a''b';",
    '{"a": [1, 2, {"b": null}], "c": "\\u00e9"}',
    "don't can't I'll we've he'd I'm it's they're DON'T",
    "    leading and trailing    ",
    "First point. Second point.",
    "First point. ",
    "Second point.",
    "snake_case camelCase SCREAMING_CASE kebab-case",
    "https://example.org/a?b=c&d=%20#e",
    "user@example.org",
    "$12.50 €3 £4 ¥5",
    "smile 😀 smile 😀 smile",
    "😀",
    "👨\u200d👩\u200d👧\u200d👦",
    "👍🏽 🇩🇪 🏳️\u200d🌈",
    "ď",
    "naïve café résumé",
    "cafe\u0301 e\u0308",
    "Zu\u0308rich Zürich",
    "שלום עולם",
    "مرحبا بالعالم",
    "\u202bعربي\u202c mixed \u2066text\u2069",
    "日本語のテキスト",
    "中文分词测试。",
    "한국어 텍스트",
    "ภาษาไทย",
    "हिन्दी भाषा",
    "Привет, мир!",
    "Ελληνικά γράμματα",
    "ⅷ ½ ² ٣ ൩ 一二三",
    "\u00a0nbsp\u2003em\u3000ideographic",
    "zero\u200bwidth\ufeffbom",
    "\x00\x01\x1f\x7f",
    "\U0010ffff\ue000\uf8ff",
    "�",
    "a" * 300,
    "ab " * 120,
    "=" * 79,
    "🙂" * 20,
    "!@#$%^&*()_+-=[]{}|;':\",./<>?",
    "<|not_special|> < | im_end | >",
    "<b>bold</b> &amp; <i>it</i>",
    "Ġ Ċ ▁ <0xE2>",
    "The quick brown fox jumps over the lazy dog. " * 6,
)


def random_texts(count: int, seed: int) -> list[str]:
    """Strings drawn from several scripts, with white space and digits mixed in."""
    draw = random.Random(seed)
    blocks = [(32, 126), (160, 591), (880, 1279), (1424, 1791), (2304, 2431), (3585, 3675)]
    blocks += [(8192, 8303), (12352, 12543), (19968, 20400), (44032, 44400), (128512, 128591)]
    texts: list[str] = []
    for _ in range(count):
        parts: list[str] = []
        for _ in range(draw.randint(1, 12)):
            low, high = draw.choice(blocks)
            parts.append("".join(chr(draw.randint(low, high)) for _ in range(draw.randint(1, 8))))
            parts.append(draw.choice(["", " ", "  ", "\n", "\t", " 7", "42", "'s", ". "]))
        texts.append("".join(parts))
    return texts


def load_oracle(path: Path) -> Any:
    """Transformers' own conversion of the GGUF file."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)


def oracle_ids(oracle: Any, text: str) -> list[int]:
    """What transformers makes of `text`."""
    return list(oracle(text, add_special_tokens=False)["input_ids"])


def main() -> None:
    """Write the golden file."""
    from baton.models import locate

    oracle = load_oracle(locate("smollm2"))
    rows = [{"text": text, "ids": oracle_ids(oracle, text)} for text in TEXTS]
    lines = ",\n".join(json.dumps(row, ensure_ascii=True) for row in rows)
    GOLDEN.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
