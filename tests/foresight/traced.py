"""What steps are traced of, and compared with."""

import torch

from meshtrain.config import Config
from meshtrain.data.batch import Batch
from meshtrain.foresight.trace import language_batch


def batch_of(config: Config) -> Batch:
    if "vocab_size" in config.model.keys:
        return language_batch(config)
    images = torch.zeros(config.batch.micro_size, 1, 8, 8)
    return Batch.of((images,), torch.zeros(config.batch.micro_size, dtype=torch.int64))


BATCH = ("batch.global_size=8", "batch.micro_size=2", "parallel.verify=false")
LLAMA = (
    "model.hidden_size=48",
    "model.intermediate_size=112",
    "model.num_hidden_layers=2",
    "model.num_attention_heads=4",
    "model.num_key_value_heads=2",
    "data.seq_len=32",
    *BATCH,
)
# The configs in the small.
SMALL = {
    "configs/quickstart.yaml": LLAMA,
    "configs/moe.yaml": ("model.num_hidden_layers=2", "data.seq_len=32", *BATCH),
    "configs/digits.yaml": BATCH,
}
