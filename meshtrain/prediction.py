"""Multi-token prediction (DeepSeek-V3, https://arxiv.org/abs/2412.19437, section 2.2): layers
behind a model's last one, which predict tokens after the next one, in training.

With h^0 what the model's head gets, Emb its embedding and W its head, the k-th of D layers predicts
at token i the token t_{i+k+1}:

    h'_i = M_k [norm(Emb(t_{i+k})); norm(h^{k-1}_i)]      eh_proj, enorm, hnorm
    h^k  = norm(TRM_k(h'))                                a decoder layer of the model
    P_i  = softmax(W h^k_i)

    L_k   = -1/N sum over i of log P_i(t_{i+k+1})
    loss += lambda/D sum over k of L_k

N is the number of the main loss's targets in the global batch, the paper's T, and lambda
`train.mtp_loss_scaling_factor`. Where a sequence ends, or a document that attention stays within,
the k-th layer has k tokens less. Where nobody asks for predictions (`parallel/predictions.py`), as
in generation, the layers hand on what they get.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from meshtrain.data.batch import IGNORE
from meshtrain.dropout import Dropout
from meshtrain.loss import attach_sum, sample_losses
from meshtrain.parallel.linear_cross_entropy import request_loss
from meshtrain.parallel.predictions import Predictions
from meshtrain.parallel.step_context import current_context
from meshtrain.parallel.torch_private import backward_is_running, never_compiled

# What one block hands to the next, (b, s, d) each: x for the model's head, to which the losses of
# predictions are attached; h of the depth before; the embedded tokens ahead. It has one form,
# whether there are predictions or not.
State = tuple[Tensor, Tensor, Tensor]


class AheadEmbedding(nn.Module):
    """Embeds the tokens ahead, by the weight of the model's embedding."""

    left_out = ("compile", "checkpoint")  # of what is wrapped around blocks: it is one layer

    def __init__(self, embedding: nn.Embedding, depth: int) -> None:
        super().__init__()
        self.depth = depth
        self.embed_tokens = nn.Embedding(embedding.num_embeddings, embedding.embedding_dim)
        self.embed_tokens.weight = embedding.weight

    def forward(self, state: State) -> State:
        x, h, embedded = state
        predictions = current_context().predictions
        if predictions is not None:
            embedded = self.embed_tokens(predictions.tokens(self.depth))
        return x, h, embedded


class PredictionLayer(nn.Module):
    """Combines the tokens ahead with the depth before, and computes h of this depth."""

    left_out = ("compile",)  # it asks the step which tokens are real

    def __init__(
        self,
        decoder: nn.Module,
        depth: int,
        width: int,
        norm: Callable[[], nn.Module],
        dropout: float,
    ) -> None:
        super().__init__()
        self.depth = depth
        self.dropout = Dropout(dropout)
        self.enorm = norm()
        self.hnorm = norm()
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.decoder = decoder
        self.norm = norm()

    def forward(self, state: State, *arguments: Any) -> State:
        x, h, embedded = state
        predictions = current_context().predictions
        if predictions is None:
            return state
        # The embedding comes first, as in the published weights.
        pair = torch.cat((self.enorm(self.dropout(embedded)), self.hnorm(h)), dim=-1)
        with predictions.only_real(self.depth):
            h = self.decoder(self.eh_proj(pair), *arguments)
        return x, self.norm(h), embedded


class PredictionHead(nn.Module):
    """Attaches the loss of the predicted tokens to x, by the weight of the model's head."""

    left_out = ("compile", "checkpoint")  # it computes gradients in its forward
    predicts_ahead = True

    def __init__(self, head: nn.Linear, depth: int) -> None:
        super().__init__()
        self.depth = depth
        self.lm_head = nn.Linear(head.in_features, head.out_features, bias=False)
        self.lm_head.weight = head.weight

    def forward(self, state: State) -> State:
        x, h, embedded = state
        predictions = current_context().predictions
        if predictions is not None:
            x = self.attach_loss(x, h, predictions)
        return x, h, embedded

    @never_compiled
    def attach_loss(self, x: Tensor, h: Tensor, predictions: Predictions) -> Tensor:
        depth = self.depth
        targets = predictions.targets(depth)
        with request_loss(predictions.request(depth)) as request:
            output = self.lm_head(h)
        losses = request.losses_of(output)
        factor = predictions.factor

        if losses is not None:  # the head has computed them: `output` is multiplied already
            total = output
            factor = None if factor is None else lambda: torch.ones_like(output)
        else:
            options = predictions.options
            losses = sample_losses(
                output, targets, label_smoothing=options.label_smoothing, z_loss=options.z_loss
            )
            total = losses.sum()

        if not backward_is_running():  # else a block is recomputed, and has been counted
            count = (targets != IGNORE).sum()
            predictions.take(depth, losses.detach().double().sum(), count.double())
        if factor is None or not torch.is_grad_enabled():
            return x
        return attach_sum(x, total, factor)


class Prediction(nn.Module):
    """One depth, as three blocks."""

    def __init__(self, ahead: AheadEmbedding, layer: PredictionLayer, head: PredictionHead) -> None:
        super().__init__()
        self.ahead = ahead
        self.layer = layer
        self.head = head

    def blocks(self) -> list[nn.Module]:
        return [self.ahead, self.layer, self.head]

    def forward(self, state: State, *arguments: Any) -> State:
        return self.head(self.layer(self.ahead(state), *arguments))


class MultiTokenPrediction(nn.ModuleList):
    """The predictions of a model, one depth behind the other; none for no `decoders`.

    A model calls it between its last norm and its head, `x = self.mtp(x, arguments)`, and names its
    blocks there: `[..., self.norm, *self.mtp.blocks(), self.lm_head]`.
    """

    def __init__(
        self,
        decoders: Iterable[nn.Module],
        embedding: nn.Embedding,
        head: nn.Linear,
        norm: Callable[[], nn.Module],
        dropout: float = 0.0,
    ) -> None:
        """
        Args:
            decoders: a decoder layer for each depth, (b, s, d) -> (b, s, d).
            embedding, head: of the model; predictions share their weights.
            norm: makes a norm of (b, s, d).
            dropout: probability, after the embedding.
        """
        super().__init__()
        for depth, decoder in enumerate(decoders, start=1):
            ahead = AheadEmbedding(embedding, depth)
            layer = PredictionLayer(decoder, depth, head.in_features, norm, dropout)
            self.append(Prediction(ahead, layer, PredictionHead(head, depth)))

    def blocks(self) -> list[nn.Module]:
        """In execution order."""
        blocks: list[nn.Module] = []
        for prediction in self:
            assert isinstance(prediction, Prediction)
            blocks += prediction.blocks()
        return blocks

    def forward(self, x: Tensor, arguments: Callable[[int], tuple[Any, ...]]) -> Tensor:
        """x (b, s, d), what the model's head gets -> the same, with the losses of predictions
        attached. `arguments`: index of a decoder -> what it takes beside its input."""
        state = (x, x, x)
        for index in range(len(self)):
            state = self[index](state, *arguments(index))
        return state[0]
