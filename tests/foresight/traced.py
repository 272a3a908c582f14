"""Small configs whose steps are traced and compared with real ones."""

from meshtrain.config import Config
from meshtrain.foresight.memory import RankMemory
from meshtrain.foresight.prediction import Prediction

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
# The configs, with overrides that make them small.
SMALL = {
    "configs/quickstart.yaml": LLAMA,
    "configs/moe.yaml": ("model.num_hidden_layers=2", "data.seq_len=32", *BATCH),
    "configs/digits.yaml": BATCH,
}


def of_whole_step(config: Config, by_blocks: RankMemory) -> RankMemory:
    """The memory of the same rank as `by_blocks`, from a trace of its whole step."""
    ranks = Prediction(config, exact=True).ranks
    [whole] = [rank for rank in ranks if rank.pp == by_blocks.pp]
    assert (by_blocks.source, whole.source) == ("by blocks", "traced")
    return whole
