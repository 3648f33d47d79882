"""How much memory this process grows by while a model is quantised or loaded, as JSON.

``python memory.py make|place|load|folder|checkpoint FOLDER OUT [KIND]``: a Llama of some 500 MB of
floats is made, quantised while it is loaded, loaded, quantised folder to folder, or read from AWQ's
form. KIND: ``mixtral`` or ``gptoss``, of some 150 MB that are nearly all in their experts.
What is counted are pages of the process's own, not those of mapped files, which the system keeps
as long as it likes.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import transformers as tf

import gemmule as gm
import gemmule.torch as gt
from gemmule.torch import layer, pretrained  # noqa: F401  what importing takes is not growth
from gemmule.torch.report import nbytes

_MIXTURE = {
    "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 3,
    "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 1024, "dtype": "float32",
    "num_local_experts": 8, "num_experts_per_tok": 2, "pad_token_id": 0,
}  # fmt: skip
# The model's class, its configuration, and the bytes of its largest weight.
KINDS: dict[str, tuple[Any, Any, int]] = {
    "llama": (
        tf.LlamaForCausalLM,
        tf.LlamaConfig(
            hidden_size=1024, intermediate_size=4096, num_hidden_layers=7, num_attention_heads=8,
            num_key_value_heads=8, vocab_size=4096, dtype="float32",
        ),
        4 * 1024 * 4096,
    ),
    "mixtral": (tf.MixtralForCausalLM, tf.MixtralConfig(**_MIXTURE), 4 * 8 * 512 * 2048),
    "gptoss": (tf.GptOssForCausalLM, tf.GptOssConfig(**_MIXTURE, head_dim=64), 4 * 8 * 512 * 2048),
}  # fmt: skip


def own_bytes() -> int:
    """Return the bytes of this process that no file holds."""
    status = Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("RssAnon"))
    return 1024 * int(line.split()[1])


class Watch(threading.Thread):
    """Samples the process's memory, and keeps the most."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.begun, self.most, self.on = own_bytes(), 0, True

    def run(self) -> None:
        while self.on:
            self.most = max(self.most, own_bytes())
            time.sleep(0.001)

    def grown(self) -> int:
        self.on = False
        self.join()
        return max(self.most, own_bytes()) - self.begun


def work(what: str, kind: Any, folder: Path, out: Path) -> Any:
    """Do one thing; return the model that was made, if there is one."""
    if what == "place":
        config = gt.GemmuleConfig(bits=4, modules_to_not_convert=[])
        return kind.from_pretrained(folder, quantization_config=config)
    if what == "load":
        return kind.from_pretrained(folder)
    if what == "checkpoint":
        return gt.load_checkpoint(folder)
    from gemmule.torch.folders import quantise_folder

    config = gt.GemmuleConfig(bits=4, modules_to_not_convert=[])
    list(quantise_folder(folder, out, config, most_bytes=1 << 24)[1])
    return None


if __name__ == "__main__":
    what, folder, out = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    kind, config, layer_bytes = KINDS[sys.argv[4] if len(sys.argv) > 4 else "llama"]
    tf.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    if what == "make":
        kind(config).save_pretrained(folder, max_shard_size="100MB")
        sys.exit()
    # What the first quantisation and the first model take for themselves.
    tiny = torch.nn.Sequential(torch.nn.Linear(256, 256))
    gt.quantize_(tiny)
    tiny(torch.ones(1, 256))
    gm.quantize_experts(torch.ones(2, 64, 64))
    tf.LlamaForCausalLM(tf.LlamaConfig(hidden_size=64, num_hidden_layers=1, vocab_size=64))
    watch = Watch()
    watch.start()
    model = work(what, kind, folder, out)
    grown = watch.grown()
    served = 0 if model is None else nbytes(model)
    if what == "place":
        model.save_pretrained(out)
    print(json.dumps({"grown": grown, "served": served, "layer": layer_bytes}))
