"""Makes the golden files of the engine with Hugging Face transformers on the same weights.

Run by hand when the prompts change; the tests only read its output:

    OMP_NUM_THREADS=2 python tests/oracle/make_golden.py path/to/SmolLM2-135M-Instruct.Q4_1.gguf

Writes `tests/oracle/golden_float32.json` (prompts, greedy ids, top-2 gaps, some logits) and the
reference of the golden check, `baton/engine/references/smollm2.npz`. The GGUF weights are
dequantised to float32 by transformers itself; none of our engine computes anything here.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import transformers
from blake3 import blake3

from baton.engine.golden_check import (
    FORCED_TOKENS,
    REFERENCES,
    GoldenReference,
    sketch,
    write_reference,
)

GOLDEN_FILE: Final = Path(__file__).parent / "golden_float32.json"
GREEDY_TOKENS: Final = 32
LONG_GREEDY_TOKENS: Final = 16
LONG_PROMPT_TOKENS: Final = 1500
LOGITS_KEPT: Final = 64
CHECK_PROMPT: Final = "The capital of France is Paris. The capital of Japan is"

SHORT_STORY: Final = (
    "Once upon a time there was a small lighthouse on a rocky island far from the shore. "
    "Every evening the keeper climbed the stairs and lit the lamp for the ships."
)
PROMPTS: Final[dict[str, str]] = {
    "english_fact": "The three primary colours are",
    "english_story": SHORT_STORY,
    "english_question": "Why is the sky blue? Explain in one sentence.",
    "english_list": "Shopping list:\n- milk\n- bread\n-",
    "chinese": "中国的首都是北京,人口超过两千万。请介绍一下这座城市的历史。",
    "japanese": "日本の首都は東京です。東京は",
    "arabic": "عاصمة مصر هي القاهرة، وهي مدينة كبيرة تقع على نهر النيل.",
    "hindi": "भारत की राजधानी नई दिल्ली है। यह शहर बहुत बड़ा है।",
    "russian": "Москва — столица России. Город стоит на реке",
    "french": "Il était une fois une petite fille qui aimait beaucoup",
    "emoji": "🎉🎂 Happy birthday! 🥳👩‍👩‍👧‍👦🏳️‍🌈 I hope you have a",
    "code_python": "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "code_c": "#include <stdio.h>\n\nint main(void) {\n    for (int i = 0; i < 10; i++) {\n",
    "code_json": '{"name": "Ada", "born": 1815, "fields": ["mathematics", "computing"], "died":',
    "one_token": "Hello",
    "digits": "1 2 3 4 5 6 7 8 9 10 11 12 13 14",
    "arithmetic": "12345 + 67890 = 80235\n31415 + 27182 =",
    "whitespace": "   \n\n\t  \n    indented   text \t with   gaps\n\n\n",
    "punctuation": "!!! ??? ... --- ((())) [[[]]] {{{}}} <<<>>> @@@ ### $$$ %%% ^^^ &&& ***",
    "repetition": "buffalo " * 20,
    "mixed_scripts": "Hello 你好 مرحبا नमस्ते Привет γειά σου 안녕하세요 שלום",
    "special_text": "The token <|im_end|> ends a turn; <|im_start|> begins one.",
    "markdown": "# Title\n\n| a | b |\n| --- | --- |\n| 1 | 2 |\n| 3 |",
}
CHATS: Final[dict[str, list[dict[str, str]]]] = {
    "chat_system": [
        {"role": "system", "content": "You are a terse assistant. Answer in one short sentence."},
        {"role": "user", "content": "What is the largest planet?"},
    ],
    "chat_default_system": [{"role": "user", "content": "Write a haiku about rain."}],
    "chat_turns": [
        {"role": "system", "content": "You are a helpful guide to Rome."},
        {"role": "user", "content": "What should I see first?"},
        {"role": "assistant", "content": "The Colosseum is a good start."},
        {"role": "user", "content": "And after that?"},
    ],
}
LOGITS_FOR: Final = ("english_story", "chinese", "code_python", "chat_system", "long_1500")


@dataclass(frozen=True, slots=True, kw_only=True)
class Oracle:
    """transformers' model and tokenizer, both made from the GGUF file."""

    model: Any
    tokenizer: Any

    def ids(self, text: str) -> list[int]:
        """Token ids of `text`, nothing added."""
        encoding = self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
        return list(encoding.ids)

    @torch.inference_mode()
    def greedy(self, prompt_ids: list[int], count: int) -> tuple[list[int], np.ndarray]:
        """`count` greedy ids, end tokens like any other, and the logits before each."""
        out = self.model(input_ids=torch.tensor([prompt_ids]), use_cache=True, logits_to_keep=1)
        ids: list[int] = []
        rows: list[np.ndarray] = []
        while True:
            row = out.logits[0, -1].float()
            rows.append(row.numpy())
            if len(rows) > count:
                return ids, np.stack(rows)
            ids.append(int(row.argmax()))
            out = self.model(
                input_ids=torch.tensor([ids[-1:]]),
                past_key_values=out.past_key_values,
                use_cache=True,
            )


def main() -> None:
    """Load, compute every prompt, write both files."""
    model_path = Path(sys.argv[1])
    oracle = load(model_path)
    cases = [compute(oracle, name, text) for name, text in texts(oracle).items()]
    document = {
        "model_file": model_path.name,
        "weights_blake3": digest(model_path).hex(),
        "transformers": transformers.__version__,
        "torch": torch.__version__.split("+")[0],
        "dtype": "float32",
        "cases": cases,
    }
    GOLDEN_FILE.write_text(json.dumps(document, ensure_ascii=False, indent=1) + "\n", "utf-8")
    write_check_reference(oracle, model_path)
    smallest = min(min(case["gaps"]) for case in cases)
    print(f"{len(cases)} cases, smallest top-2 gap {smallest:.5f}")


def load(model_path: Path) -> Oracle:
    """The oracle for one GGUF file, float32."""
    folder, name = str(model_path.parent), model_path.name
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        gguf_file=name,
        dtype=torch.float32,
        quantization_config=transformers.GgufConfig(dequantize=True),
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=name)
    return Oracle(model=model.eval(), tokenizer=tokenizer)


def texts(oracle: Oracle) -> dict[str, str]:
    """Every prompt text by name."""
    found = dict(PROMPTS)
    for name, messages in CHATS.items():
        found[name] = oracle.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
    for count in (15, 16, 17, 31, 32, 33):
        found[f"exactly_{count}"] = text_of(oracle, SHORT_STORY, count)
    facts = " ".join(
        f"Item {number}: the {number * 7 % 97}th room holds {number * 13 % 89} boxes of "
        f"{('apples', 'books', 'lamps', 'shells', 'coins')[number % 5]}."
        for number in range(200)
    )
    found["long_1500"] = text_of(oracle, facts, LONG_PROMPT_TOKENS)
    return found


def text_of(oracle: Oracle, source: str, count: int) -> str:
    """The shortest beginning of `source` that has exactly `count` tokens."""
    for length in range(1, len(source) + 1):
        if length >= count and len(oracle.ids(source[:length])) == count:
            return source[:length]
    raise ValueError(f"no beginning of the text has {count} tokens")


def compute(oracle: Oracle, name: str, text: str) -> dict[str, Any]:
    """One case of the golden file."""
    prompt_ids = oracle.ids(text)
    count = LONG_GREEDY_TOKENS if len(prompt_ids) >= LONG_PROMPT_TOKENS else GREEDY_TOKENS
    greedy_ids, rows = oracle.greedy(prompt_ids, count)
    best = np.sort(rows[:count], axis=1)[:, -2:]
    case: dict[str, Any] = {
        "name": name,
        "text": text,
        "prompt_ids": prompt_ids,
        "greedy_ids": greedy_ids,
        "gaps": [round(float(high - low), 6) for low, high in best],
    }
    if name in LOGITS_FOR:
        top = np.argsort(-rows[0], kind="stable")[:LOGITS_KEPT]
        case["logit_ids"] = top.tolist()
        case["logits"] = [round(float(rows[0][i]), 5) for i in top]
    return case


def write_check_reference(oracle: Oracle, model_path: Path) -> None:
    """The golden check's reference: logits after the prompt and after each forced token."""
    prompt_ids = oracle.ids(CHECK_PROMPT)
    forced_ids, rows = oracle.greedy(prompt_ids, FORCED_TOKENS)
    reference = GoldenReference(
        weight_hashes=(digest(model_path),),
        prompt_ids=tuple(prompt_ids),
        forced_ids=tuple(forced_ids),
        sketches=np.stack([sketch(row) for row in rows]),
    )
    REFERENCES.mkdir(exist_ok=True)
    write_reference(REFERENCES / "smollm2.npz", reference)


def digest(model_path: Path) -> bytes:
    """BLAKE3 of the weight file as stored."""
    return blake3().update_mmap(model_path).digest()


if __name__ == "__main__":
    main()
