"""A loss with a frozen reference: the same curve and evaluation on every layout as in one process."""

from pathlib import Path

import pytest
from safetensors.torch import save_file

from meshtrain.config import Config
from meshtrain.job.process import Job
from meshtrain.modeling.build import build_model
from tests import ranks
from tests.comparing import ALONE, CPU
from tests.parity.experiments import Experiment
from tests.parity.runs import assert_parity
from tests.parity.test_own_loss import EXACT
from tests.ranks import made_once

SIZES = (
    "model.weights=null",
    "model.hidden_size=48",
    "model.intermediate_size=112",
    "model.num_hidden_layers=2",
    "model.num_attention_heads=4",
    "model.num_key_value_heads=2",
    "model.vocab_size=256",
    "train.sample_tokens=0",
)
OF_EXAMPLES = {
    "distillation": (*EXACT, *SIZES, "data.seq_len=24"),
    "dpo": (*EXACT, *SIZES, "optimizer.lr=3e-3"),
}
LAYOUTS = (
    (2, "{dp_replicate: 2}", ("parallel.recompute=full",)),
    (2, "{dp_shard: 2}", ("batch.micro_size=7",)),
    (2, "{tp: 2}", ()),
    (2, "{tp: 2}", ("parallel.sequence_parallel=false",)),
    (2, "{pp: 2}", ()),
    (2, "{pp: 2}", ("pipeline.schedule=zbv", "batch.micro_size=3")),
    (3, "{dp_shard: 3}", ()),
    (3, "{dp_replicate: 3}", ("batch.micro_size=1",)),
    (4, "{pp: 2, dp_shard: 2}", ()),
)
OF_PARTS = ((2, "{cp: 2}", ()), (4, "{cp: 2, tp: 2}", ()))


def cells() -> list:
    """Each layout with one of the examples, and, slow, with the other."""
    rows = []
    examples = list(OF_EXAMPLES)
    for number, (world, layout, more) in enumerate((*LAYOUTS, *OF_PARTS)):
        for name in examples:
            if "cp" in layout and name == "dpo":  # refused
                continue
            is_slow = name != examples[number % 2] and "cp" not in layout
            text = f"{name} {layout} {' '.join(more)}".strip()
            rows.append(ranks.row(world, layout, more, name, name=text, slow=is_slow))
    return rows


@pytest.mark.parametrize(("job", "layout", "more", "name"), cells(), indirect=["job"])
def test_same_curve_as_one_process(
    job: Job, layout: str, more: tuple[str, ...], name: str, shared_path: Path, session_path: Path
) -> None:
    experiment = experiment_of(name, session_path)
    assert_parity(job, experiment, [*more, f"layout={layout}"], shared_path, session_path)


def experiment_of(name: str, folder: Path) -> Experiment:
    """With a reference of other weights than the model begins with."""
    config = f"configs/{name}.yaml"
    keys = (*OF_EXAMPLES[name], f"data.cache={folder / 'cache'}")

    def write_weights(target: Path) -> None:
        loaded = Config.load(config, (*keys, "train.seed=7"), world_size=1)
        model = build_model(loaded, ALONE, CPU)
        tensors = {name: p.detach().contiguous() for name, p in model.named_parameters()}
        save_file(tensors, target / "model.safetensors")

    weights = folder / f"reference of {name}"
    made_once(weights, write_weights)
    return Experiment(name, config, (*keys, f"train.reference={{weights: {weights}}}"), 1e-9, 1.0)
