"""Multi-token prediction, against the paper's formula written as a loop over documents in plain
PyTorch."""

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshtrain.attention import AttentionContext
from meshtrain.config import Config
from meshtrain.data import IGNORE, OpenData, open_data, prepare_data
from meshtrain.data.batch import Batch
from meshtrain.data.order import batch_samples
from meshtrain.errors import InputError
from meshtrain.experts import Experts
from meshtrain.job.locate import model_file
from meshtrain.modeling import build
from meshtrain.modeling.flops import block_flops, sample_flops
from meshtrain.optim.lr_schedule import learning_rate
from meshtrain.parallel.options import ParallelOptions
from meshtrain.rotary import Rotary, cos_sin
from meshtrain.run.setup import readers
from meshtrain.script.spread import spread
from tests.comparing import ALONE, trainer_of

STEPS, BATCH, SEQ, D = 3, 5, 24, 2
LAMBDA = [[0, 0.3], [2, 0.1]]  # of the steps from these on
SIZES = (
    "model={name: MODEL, hidden_size: 32, intermediate_size: 32, num_hidden_layers: 2}",
    f"model.num_nextn_predict_layers={D}",
    "model.num_attention_heads=4",
    "model.moe_intermediate_size=12",
    "model.n_routed_experts=6",
    "model.router_aux_loss_coef=0.2",
    "model.router_bias_speed=0.05",
    "model.initializer_range=0.1",
)
RUN = (
    f"train.mtp_loss_scaling_factor={LAMBDA}",
    f"train.steps={STEPS}",
    "train.precision=float64",
    f"data.seq_len={SEQ}",
    "data.workers=0",
    "data.validation=0",
    f"batch.global_size={BATCH}",
    "batch.micro_size=2",
    "optimizer.lr=0.01",
    "optimizer.warmup_steps=2",
    "optimizer.clip_norm=0.5",
    "train.eval_every=0",
)


def write_documents(path: Path) -> None:
    """Prompts and answers of very different lengths: some documents are shorter than D + 1 tokens,
    and some samples have few targets with a loss."""
    rng = random.Random(0)

    def text(least: int, most: int) -> str:
        return "".join(rng.choice("abcdefgh ") for _ in range(rng.randint(least, most)))

    pairs = [{"prompt": text(0, 30), "completion": text(1, 9)} for _ in range(60)]
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))


def opened(config: Config) -> OpenData:
    prepare_data(config.data, say=lambda line: None)
    return open_data(config.data, seed=0, say=lambda line: None, n_outputs=256)


class PlainLoop:
    """Steps of a model's own modules, sample by sample and document by document."""

    def __init__(self, model: nn.Module, config: Config, data: OpenData) -> None:
        self.model, self.data = model, data
        self.masked = config.data.mask_documents
        self.keys = model.config
        self.lr = config.optimizer
        decoders = [prediction.layer.decoder for prediction in model.mtp]
        self.routed = [layer.mlp for layer in (*model.model.layers[1:], *decoders)]
        for mlp in self.routed:
            mlp.gate.balance = None
            mlp.counted = torch.zeros(mlp.experts.num_experts, dtype=torch.float64)
            mlp.sample = []
            mlp.forward = lambda x, mlp=mlp: self.mixture(mlp, x)
        matrices = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
        vectors = [p for p in model.parameters() if p.requires_grad and p.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0}]
        self.trained = [*matrices, *vectors]
        self.optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95), eps=1e-8)

    # Experts -------------------------------------------------------------------------------------

    def mixture(self, mlp: nn.Module, x: Tensor) -> Tensor:
        """Also notes what the balance of a sample needs, of each document."""
        chosen, weights = mlp.gate(x)
        scores = F.linear(x, mlp.gate.weight).sigmoid()
        hits = F.one_hot(chosen, mlp.experts.num_experts).sum(-2).double()
        mlp.sample.append((hits[0], (scores / scores.sum(-1, keepdim=True))[0]))
        mlp.counted += hits.sum((0, 1))
        return expert_by_expert(mlp.experts, x, chosen, weights) + mlp.shared_experts(x)

    def balance(self) -> Tensor:
        """The sum over the layers of the balance of one sample: DeepSeek-V3, section 2.1.2, scaled
        as in transformers."""
        terms = []
        for mlp in self.routed:
            hits, probabilities = (torch.cat(x) for x in zip(*mlp.sample, strict=True))
            mlp.sample = []
            shares = hits.sum(0) / max(len(hits), 1)
            layers = self.keys.num_hidden_layers - self.keys.first_k_dense_replace
            factor = self.keys.router_aux_loss_coef * hits.shape[1] / layers
            terms.append(factor * (shares * probabilities).sum())
        return torch.stack(terms).sum()

    # The formula ---------------------------------------------------------------------------------

    def documents(self, documents: Tensor | None) -> Iterator[slice]:
        if documents is None:
            yield slice(0, SEQ)
            return
        lengths = documents.unique_consecutive(return_counts=True)[1].tolist()
        start = 0
        for length in lengths:
            yield slice(start, start + length)
            start += length

    def decode(self, layers: list[nn.Module], x: Tensor) -> Tensor:
        """Layers on one document alone, or its beginning: (s, d) -> (s, d)."""
        theta, scaling = self.keys.rope
        angles = cos_sin(
            torch.arange(len(x))[None],
            theta,
            scaling,
            width=self.keys.rotary_width,
            max_position_embeddings=self.keys.max_position_embeddings,
            dtype=x.dtype,
        )
        for layer in layers:
            x = layer(x[None], Rotary(*angles), AttentionContext.of(None))[0]
        return x

    def sample(self, index: int) -> tuple[Tensor, list[Tensor], Tensor]:
        """Sums over the targets of a sample: of the loss, of each depth, and the balance."""
        (tokens, _, documents), targets = self.data.train.item(index, 0)
        model, main, ahead = self.model, [], [[] for _ in range(D)]
        counts = [0] * D
        for place in self.documents(documents if self.masked else None):
            t, wanted = tokens[place], targets[place]
            h = model.model.norm(self.decode(list(model.model.layers), model.model.embed_tokens(t)))
            main.append(cross_entropy(model.lm_head(h), wanted))
            for k, prediction in enumerate(model.mtp, start=1):
                h = h[: max(len(t) - k, 0)]  # h_{1:T-k}
                layer = prediction.layer
                pair = [layer.enorm(model.model.embed_tokens(t[k:])), layer.hnorm(h)]
                x = layer.eh_proj(torch.cat(pair, dim=-1))
                h = layer.norm(self.decode([layer.decoder], x)) if len(x) else x
                ahead[k - 1].append(cross_entropy(model.lm_head(h), wanted[k:]))
                counts[k - 1] += int((wanted[k:] != IGNORE).sum())
        self.targets += int((targets != IGNORE).sum())
        for k in range(D):
            self.counts[k] += counts[k]
        sums = [torch.stack(losses).sum() for losses in ahead]
        return torch.stack(main).sum(), sums, self.balance()

    def step(self, step: int) -> dict[str, float]:
        """Step `step`, from 0."""
        self.targets, self.counts = 0, [0] * D
        for mlp in self.routed:
            mlp.counted.zero_()
        samples = [self.sample(i) for i in batch_samples(0, step, BATCH, len(self.data.train))]
        n = self.targets
        main = torch.stack([sample[0] for sample in samples]).sum() / n
        depths = [torch.stack([sample[1][k] for sample in samples]).sum() for k in range(D)]
        weight = LAMBDA[0][1] if step < LAMBDA[1][0] else LAMBDA[1][1]
        mtp = weight / D * torch.stack(depths).sum() / n
        balance = torch.stack([sample[2] for sample in samples]).sum() / n

        self.optimizer.zero_grad()
        (main + mtp + balance).backward()
        norm = nn.utils.clip_grad_norm_(self.trained, 0.5)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.lr, step + 1, 10)
        self.optimizer.step()
        for mlp in self.routed:
            bias = mlp.gate.e_score_correction_bias
            bias.data += self.keys.router_bias_speed * torch.sign(mlp.counted.mean() - mlp.counted)
        found = {"loss": main, "grad_norm": norm, "loss/mtp": mtp, "loss/balance": balance}
        found |= {f"mtp_{k + 1}": depths[k] / max(self.counts[k], 1) for k in range(D)}
        return {name: value.item() for name, value in found.items()}


def expert_by_expert(experts: Experts, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for e in range(experts.num_experts):
        *tokens, slots = (chosen == e).nonzero(as_tuple=True)
        gate, up = (x[*tokens] @ experts.gate_up_proj[e].t()).chunk(2, dim=-1)
        out = (F.silu(gate) * up) @ experts.down_proj[e].t()
        y = y.index_put(tuple(tokens), out * weights[*tokens, slots, None], accumulate=True)
    return y


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum")


@pytest.mark.parametrize(("model", "masked"), [("deepseek_v3", True), ("glm4_moe", False)])
def test_steps_agree_with_the_formula(model: str, masked: bool, tmp_path: Path) -> None:
    write_documents(tmp_path / "pairs.jsonl")
    keys = [
        *(key.replace("MODEL", model) for key in SIZES),
        f"data={{source: jsonl, path: {tmp_path / 'pairs.jsonl'}, cache: {tmp_path / 'cache'}}}",
        *RUN,
        f"data.mask_documents={masked}",
    ]
    config = Config.load("configs/quickstart.yaml", keys, world_size=1, for_training=True)
    data = opened(config)
    trainer = trainer_of(config, ALONE)
    reference = PlainLoop(build.build_model(config, ALONE, torch.device("cpu")), config, data)
    batches, _ = readers(config, ALONE, data, None, first_step=0, steps=STEPS)
    for step, microbatches in enumerate(batches):
        trainer.forward_backward(step + 1, microbatches)
        result = trainer.optimizer_step(step + 1)()
        expected = reference.step(step)
        found = {"loss": result.loss, "grad_norm": result.grad_norm, **result.terms}
        assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-9)
        assert result.lr == pytest.approx(reference.optimizer.param_groups[0]["lr"])
        trained = dict(trainer.model.named_parameters())
        for name, parameter in reference.model.named_parameters():
            torch.testing.assert_close(trained[name], parameter, rtol=1e-9, atol=1e-12)
    assert result.terms["mtp_1"] > 0


# Tokens ahead ------------------------------------------------------------------------------------


def ahead_of(batch: Batch, depths: int) -> list[list[list[int]]]:
    """Of each row and depth the pairs (token, target), as they stand at the places."""
    ahead = batch.looking_ahead(depths).ahead
    return ahead.permute(0, 2, 1, 3).tolist()


def test_what_is_predicted_ends_with_the_sequence_and_with_a_document() -> None:
    """Targets without a loss stay so; another document's tokens are not seen."""
    none = [IGNORE, IGNORE]
    tokens, targets = torch.tensor([[1, 2, 3, 4, 5]]), torch.tensor([[2, IGNORE, 4, 5, 6]])
    batch = Batch.of((tokens, torch.arange(5)[None], None), targets)
    first = [[2, IGNORE], [3, 4], [4, 5], [5, 6], none]
    second = [[3, 4], [4, 5], [5, 6], none, none]
    assert ahead_of(batch, 2) == [[first, second]]

    documents = torch.tensor([[0, 0, 0, 1, 1]])
    for packed in (documents, AttentionContext(documents)):
        batch = Batch.of((tokens, torch.arange(5)[None], packed), targets)
        first = [[2, IGNORE], [3, 4], none, [5, 6], none]
        assert ahead_of(batch, 2) == [[first, [[3, 4], none, none, none, none]]]
    # A document that goes on behind another one is left where it is interrupted.
    batch = Batch.of((tokens, torch.arange(5)[None], torch.tensor([[0, 1, 0, 0, 0]])), targets)
    assert ahead_of(batch, 2)[0][1] == [none, none, [5, 6], none, none]
    assert ahead_of(batch, 9)[0][8] == [none] * 5
    assert batch.looking_ahead(0) is batch


def test_data_without_a_target_for_each_token_are_refused() -> None:
    tokens = torch.zeros(2, 5, dtype=torch.int64)
    for inputs, targets in (
        (tokens, torch.zeros(2, dtype=torch.int64)),
        (torch.zeros(2, 5, 3), tokens),
    ):
        with pytest.raises(InputError, match="num_nextn_predict_layers: 0"):
            Batch.of((inputs, None, None), targets).looking_ahead(1)


# Models ------------------------------------------------------------------------------------------


def glm(**keys: int) -> nn.Module:
    module = model_file("glm4_moe")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 40}
    torch.manual_seed(0)
    return module.Model(module.Config(**sizes, num_attention_heads=4, **keys))


def test_nobody_asks_for_predictions_in_a_plain_forward() -> None:
    """Logits, gradients and all other first values are those of the model without."""
    model, other = glm(num_nextn_predict_layers=2), glm()
    other.load_state_dict({name: model.state_dict()[name] for name in other.state_dict()})
    tokens = torch.randint(40, (2, 9))
    for one in (model, other):
        cross_entropy(one(tokens).flatten(0, 1), tokens.flatten()).backward()
    assert torch.equal(model(tokens), other(tokens))
    for name, parameter in model.named_parameters():
        expected = None if name.startswith("mtp.") else other.get_parameter(name).grad
        if expected is None:  # also of the router's bias, which is not trained by gradients
            assert parameter.grad is None, name
        else:
            assert torch.equal(parameter.grad, expected), name


def test_flops_count_what_is_predicted() -> None:
    tokens = torch.zeros(1, 9, dtype=torch.int64)
    costs = {}
    for depths in (0, 1, 2):
        model = glm(num_nextn_predict_layers=depths, first_k_dense_replace=0)
        flops, _ = sample_flops(model, (tokens, tokens, None))
        of_blocks, _ = block_flops(model, model.blocks(), (tokens, tokens, None))
        assert len(of_blocks) == 5 + 3 * depths
        costs[depths] = flops
    assert costs[2] - costs[1] == costs[1] - costs[0] > 0.25 * costs[0]


def test_a_loss_of_its_own_and_a_script_are_refused(tmp_path: Path) -> None:
    own = tmp_path / "mine.py"
    own.write_text(
        "from meshtrain.job.locate import model_file\n"
        "glm = model_file('glm4_moe')\n"
        "Config, Model, cp_plan, init_plan = glm.Config, glm.Model, glm.cp_plan, glm.init_plan\n"
        "def loss(outputs, targets):\n    return outputs.sum((1, 2))\n"
    )
    keys = [f"model={{name: {own}, hidden_size: 32, num_nextn_predict_layers: 1}}"]
    with pytest.raises(InputError, match="has a loss of its own: leave those layers out"):
        build.check_start(Config.load("configs/quickstart.yaml", keys, world_size=1))
    options = ParallelOptions()
    with pytest.raises(InputError, match="they would learn nothing"):
        spread(
            glm(num_nextn_predict_layers=1),
            ALONE,
            torch.device("cpu"),
            options,
            schedule="1f1b",
            microbatches=1,
            global_size=1,
            micro_size=1,
        )
