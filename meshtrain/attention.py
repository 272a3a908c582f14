"""Attention as models call it: a function that picks the kernel, and a record of what it needs to
know about tokens.

The record passes through a model like any other argument, so recomputation and compilation need no
special case for it. Another kind of attention (such as over parts of a sequence) is a subclass of
the record with its own `attend`.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

if TYPE_CHECKING:
    from meshtrain.dropout import Dropout

# (positions of queries (1 or b, s), of keys (1 or b, t)) -> (1 or b, h of this rank, s, t)
Bias = Callable[[Tensor, Tensor], Tensor]

VARLEN_TYPES = torch.float16, torch.bfloat16  # the dtypes of variable-length attention


class AttentionOptions(NamedTuple):
    """The options of `attention`, as it has got them."""

    scale: float | None = None
    window: int | None = None
    soft_cap: float | None = None
    sinks: Tensor | None = None
    bias: Bias | None = None
    dropout: "Dropout | None" = None  # None: nothing is dropped now


@dataclass(eq=False, repr=False)
class AttentionContext:
    """What attention must know about the tokens of a microbatch."""

    # (b, s), each token's document; no attention across documents; None: one per row
    documents: Tensor | None = None
    # int32, document starts: see `cumulative_lengths`. None: no documents or not counted
    lengths: Tensor | None = None
    # variable-length attention, where available: see `varlen_kernel`
    kernel: Callable[..., Tensor] | None = None
    # (s of this rank), the positions in the sequence that this rank holds; None: all
    part: Tensor | None = None
    # tokens of the whole sequence, without padding, if this rank holds a part of it; 0: s
    length: int = 0
    cache: "KVCache | None" = None  # keys and values of earlier tokens, in generation
    layer: int | None = None  # index of the calling layer, when there is a cache; see `at`
    # (b, 1, s, s) bool, the mask of the documents: built once, shared by the layers
    mask: Tensor | None = None
    # window -> `mask` with that sliding window
    windows: dict[int, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, documents: "AttentionContext | Tensor | None") -> "AttentionContext":
        """The record for a forward pass, with its mask: from a batch's record, a plain tensor (b,
        s), or None.

        A model calls it outside its blocks. With a variable-length kernel there is no mask.
        """
        context = documents if isinstance(documents, AttentionContext) else cls(documents)
        unmasked = context.mask is None and context.part is None and context.kernel is None
        if unmasked and context.documents is not None:
            context.mask = document_mask(context.documents)
        return context

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the documents, on which the sizes of activations depend."""
        return () if self.documents is None else tuple(self.documents.shape)

    def at(self, layer: int) -> "AttentionContext":
        """This record for one layer. A copy: recomputation in backward must see the layer that it
        saw in forward."""
        return self if self.cache is None else replace(self, layer=layer)

    def apply(self, function: Callable[[Tensor], Tensor]) -> "AttentionContext":
        """A copy with `function` applied to each tensor, for instance to move it to a device."""
        changed: dict[str, Any] = {}
        for name in ("documents", "lengths", "part", "mask"):
            tensor = getattr(self, name)
            if tensor is not None:
                changed[name] = function(tensor)
        return replace(self, **changed, windows={})

    def to(
        self, device: torch.device, dtype: torch.dtype | None = None, non_blocking: bool = False
    ) -> Any:
        """A copy on a device. `dtype`: the type of q, k and v, which decides the kernel."""
        moved = self.apply(lambda x: x.to(device, non_blocking=non_blocking))
        moved.kernel = None if moved.lengths is None else varlen_kernel(torch.device(device), dtype)
        if moved.kernel is not None:  # one graph for any number of documents
            torch._dynamo.maybe_mark_dynamic(moved.lengths, 0)
        return moved

    def pin_memory(self) -> "AttentionContext":
        return self.apply(Tensor.pin_memory)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        """`attention` of these tokens."""
        if self.cache is not None and self.documents is None:
            return self._attend_cached(self.cache, q, k, v, options)
        if self.part is not None or self.cache is not None:
            raise ValueError(
                "a cache takes no documents, and parts of a sequence are those of a ShardedContext"
            )
        # Packed documents have a kernel of their own on some devices, and elsewhere a mask.
        if self.kernel is None or self.lengths is None or not self._fits_varlen(q, k, v, options):
            mask = self._mask(options.window, k)
            return _attend(q, k, v, mask, options)
        if options.sinks is not None:
            return _with_sinks(q, k, v, options, ends=self.lengths)
        return _varlen(self.kernel, (q, k, v), self.lengths, options.scale, options.window)

    def _attend_cached(
        self, cache: "KVCache", q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions
    ) -> Tensor:
        """In generation: q, k and v are those of new tokens, which see earlier ones, too."""
        keys, values = cache.extend(self.layer, k, v)
        mask = cache.mask(q.shape[2], keys.shape[2], options.window)
        return _attend(q, keys, values, mask, options, cache)

    def _fits_varlen(self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> bool:
        """Whether a kernel for packed documents computes this."""
        # If the shapes differ, masked attention reports the mismatch.
        of_queries = (q.shape[0], q.shape[2])
        of_keys = (k.shape[0], k.shape[2])
        if self.shape != of_queries or self.shape != of_keys:
            return False
        return not _needs_scores(options) and takes_varlen(q, k, v)

    def _mask(self, window: int | None, k: Tensor) -> Tensor | None:
        """Of the documents, with a sliding window. The layers share what is made once."""
        # Compiled, a stored mask is a guard that fails at the next layer.
        keep = not torch.compiler.is_compiling()
        mask = self.mask
        if mask is None and self.documents is not None:
            mask = document_mask(self.documents)
            if keep:
                self.mask = mask
        if window is None or window >= k.shape[2]:
            return mask
        if keep and window in self.windows:
            return self.windows[window]
        mask = _windowed(mask, window, k)
        if keep:
            self.windows[window] = mask
        return mask

    def __repr__(self) -> str:
        return f"AttentionContext{self.shape}"


class KVCache:
    """Keys and values of the tokens so far, per layer, so that a forward pass takes only the new
    tokens. Prompts of different lengths end in the same column: shorter ones are padded on the
    left, where no token attends.

    Not a dataclass, so that FSDP finds no tensors to cast in it: it passes through a model
    unchanged.
    """

    def __init__(self, starts: Tensor) -> None:
        """`starts`: (b,) int64, the column of the first token of each row."""
        self.starts = starts
        self._layers: dict[int | None, tuple[Tensor, Tensor]] = {}

    def extend(self, layer: int | None, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Appends the keys and values of new tokens (b, k, s, e) to those of the layer; returns all
        of them."""
        if layer in self._layers:
            keys, values = self._layers[layer]
            k = torch.cat((keys, k), dim=2)
            v = torch.cat((values, v), dim=2)
        self._layers[layer] = k, v
        return k, v

    def mask(self, queries: int, keys: int, window: int | None) -> Tensor:
        """(b, 1, queries, keys) bool, True where one of the last `queries` tokens sees a key.
        Padding sees itself: a softmax over no keys would be NaN, and NaN would spread through its
        values."""
        columns = torch.arange(keys, device=self.starts.device)
        distance = columns[keys - queries :, None] - columns
        near = (distance >= 0) & (distance < (window or keys))
        return (near & (columns >= self.starts[:, None, None, None])) | (distance == 0)

    def positions(self, keys: int) -> Tensor:
        """(b, keys) int64: the position of each column in its row's text; that of padding is 0."""
        columns = torch.arange(keys, device=self.starts.device)
        return (columns - self.starts[:, None]).clamp(min=0)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: AttentionContext | Tensor | None = None,
    *,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    bias: Bias | None = None,
    dropout: "Dropout | float" = 0.0,
) -> Tensor:
    """Causal scaled dot-product attention with grouped key/value heads.

    The scores of a query and the keys that it sees become probabilities, in this order:

        x = scale q k,   x = soft_cap tanh(x / soft_cap),   x = x + bias,   p = softmax(x, sink)

    Args:
        q: (b, h, s, e).
        k: (b, k, s, e); h is a multiple of k, and each key/value head serves h/k query heads.
        v: (b, k, s, f), with any width f.
        context: None for one document per row; a tensor: a mask for (b, h, s, s), True where a
            query sees a key.
        scale: factor of the scores; None: 1 / sqrt(e).
        window: a token sees itself and the window - 1 tokens before it
            (https://arxiv.org/abs/2004.05150); None: all. Each call has its own, so layers may
            differ.
        soft_cap: see above (Gemma 2, https://arxiv.org/abs/2408.00118, section 2).
        sinks: (h,), a learned logit per head that takes probability from the keys and has no value:
            p_j = exp(x_j) / (exp(sink) + sum exp(x_i)) (gpt-oss, https://arxiv.org/abs/2508.10925;
            transformers' `s_aux`).
        bias: called as bias(positions of queries (1 or b, s), positions of keys (1 or b, t)), both
            int64; returns (1 or b, h, s, t), for the h query heads of this rank. Parameters in it
            get gradients. Positions count the tokens of a row from 0, wherever its documents begin
            and whichever part of it this rank has, so that a bias by distance (ALiBi,
            https://arxiv.org/abs/2108.12409; T5) is right with documents too. In generation they
            count from the first token of each prompt.
        dropout: a `meshtrain.dropout.Dropout(p, heads=...)` of the calling module, which drops
            probabilities in training, the same ones on every layout; 0: none.

    Costs: `sinks` alone use fused kernels. With `soft_cap`, `bias` or `dropout` all scores (b, h,
    s, s) are in memory, because no fused kernel of torch has them (over `cp` those of one block at
    a time, but the bias of this rank's queries for all keys until the backward).

    Returns (b, h, s, f). Raises ValueError: `dropout` is a probability, whose masks would depend on
    the layout.
    """
    # torch's protocol to intercept calls, used by `modeling.flops`
    if has_torch_function((q, k, v)):
        given: Any = {
            "scale": scale,
            "window": window,
            "soft_cap": soft_cap,
            "sinks": sinks,
            "bias": bias,
            "dropout": dropout,
        }
        return handle_torch_function(attention, (q, k, v), q, k, v, context, **given)
    options = AttentionOptions(scale, window, soft_cap, sinks, bias, _active(dropout))
    if isinstance(context, AttentionContext):
        return context.attend(q, k, v, options)
    mask = context
    if window is not None and window < k.shape[2]:
        mask = _windowed(mask, window, k)
    return _attend(q, k, v, mask, options)


def _active(dropout: "Dropout | float") -> "Dropout | None":
    """The module, if it drops something now."""
    if isinstance(dropout, int | float):
        if dropout == 0:
            return None
        raise ValueError(
            f"attention with dropout={dropout}: a probability alone does not say which elements to "
            "drop on which layout: give the calling module a meshtrain.dropout.Dropout(p, "
            "heads=...) and pass that"
        )
    return dropout if dropout.training and dropout.p > 0 else None


def _windowed(mask: Tensor | None, window: int, k: Tensor) -> Tensor:
    near = sliding_window(k.shape[2], window, k.device)
    if mask is None:
        return near
    return mask & near if mask.dtype == torch.bool else mask.masked_fill(~near, -torch.inf)


def _needs_scores(options: AttentionOptions) -> bool:
    """Whether no fused kernel has these options."""
    return (options.soft_cap, options.bias, options.dropout) != (None, None, None)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    options: AttentionOptions,
    cache: KVCache | None = None,
) -> Tensor:
    """q (b, h, s, e) are the last s tokens of k (b, k, t, e) and v (b, k, t, f)."""
    by_scores = _needs_scores(options)
    if options.sinks is not None:
        # A mask of numbers might need a gradient.
        by_scores |= mask is not None and mask.dtype != torch.bool
        if not by_scores:
            return _with_sinks(q, k, v, options, mask=mask)

    heads = q.shape[1]
    kv_heads = k.shape[1]
    repeat = by_scores or wants_repeated(
        q.device.type, q.dtype, mask is not None, heads, kv_heads, q.shape[-1], v.shape[-1]
    )
    if repeat:
        k = k.repeat_interleave(heads // kv_heads, dim=1)
        v = v.repeat_interleave(heads // kv_heads, dim=1)
    if by_scores:
        return _by_scores(q, k, v, mask, options, cache)
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=mask is None,
        scale=options.scale,
        enable_gqa=heads != k.shape[1],
    )


def _by_scores(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    options: AttentionOptions,
    cache: KVCache | None,
) -> Tensor:
    """Attention as it is written, in float32 or wider. k (b, h, t, e) and v (b, h, t, f)."""
    b, h, s, e = q.shape
    t = k.shape[2]
    keys_at = torch.arange(t, device=q.device)[None] if cache is None else cache.positions(t)
    queries_at = keys_at[:, t - s :]

    scale, cap = options.scale, options.soft_cap
    if scale is None:
        scale = e**-0.5
    scores = (q @ k.transpose(-1, -2)).to(torch.promote_types(q.dtype, torch.float32))
    scores = scores * scale if cap is None else cap * torch.tanh(scores * (scale / cap))
    if options.bias is not None:
        scores = scores + options.bias(queries_at, keys_at)

    if mask is None:
        mask = torch.ones(s, t, dtype=torch.bool, device=q.device).tril()
    hides = mask.dtype == torch.bool  # else it is added
    scores = scores.masked_fill(~mask, -torch.inf) if hides else scores + mask

    if options.sinks is None:
        p = scores.softmax(-1)
    else:  # one more column, whose value is 0
        sinks = options.sinks.to(scores.dtype)[:, None, None].expand(b, -1, s, 1)
        p = torch.cat((scores, sinks), dim=-1).softmax(-1)[..., :t]
    if options.dropout is not None:
        keep = options.dropout.keep_pairs(b, h, queries_at, keys_at)
        p = torch.where(keep, p * (1 / (1 - options.dropout.p)), 0)
    return p.to(v.dtype) @ v


def _with_sinks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: AttentionOptions,
    *,
    mask: Tensor | None = None,
    ends: Tensor | None = None,
) -> Tensor:
    """Attention with sinks by a kernel that also returns the log-sum-exp of the scores. `mask`: of
    bools. `ends`: of packed documents, as `cumulative_lengths` has them."""
    # Here, because only models with sinks need it.
    from meshtrain.parallel.sinks import attend_with_sinks

    assert options.sinks is not None
    scale = q.shape[-1] ** -0.5 if options.scale is None else options.scale
    return attend_with_sinks(q, k, v, options.sinks, mask, ends, scale, options.window)


def wants_repeated(
    device: str,
    dtype: torch.dtype,
    masked: bool,
    heads: int,
    kv_heads: int,
    width: int,
    value_width: int | None = None,
) -> bool:
    """Whether to repeat each key/value head for all of its query heads, so that a fused kernel
    accepts them.

    On GPUs torch's flash attention takes grouped heads, but only in 16 bits, without a mask, and up
    to a width of 256, the same for values. Its memory-efficient kernel takes float32, masks and
    other widths of values, but grouped heads only in the newest versions. Elsewhere, and in
    float64, torch computes with all scores (b, h, s, s) in memory.
    """
    if device != "cuda" or heads == kv_heads or dtype == torch.float64:
        return False
    narrow = dtype in (torch.float16, torch.bfloat16)
    same_width = value_width in (None, width)
    takes_grouped_heads = narrow and not masked and width <= 256 and same_width
    return not takes_grouped_heads


@cache
def varlen_kernel(device: torch.device, dtype: torch.dtype | None) -> Callable[..., Tensor] | None:
    """torch's 16-bit attention over packed documents, for this GPU; None if the GPU does not
    support it.

    FlashAttention-2 (Dao, https://arxiv.org/abs/2307.08691), or 3
    (https://arxiv.org/abs/2407.08608) on Hopper where the module `flash_attn_interface` is
    installed, which then computes all of torch's flash attention in this process.
    """
    if not has_varlen(device, dtype):
        return None
    from torch.nn import attention as back_ends
    from torch.nn.attention.varlen import varlen_attn  # imports the compiler, 2 s

    is_hopper = torch.cuda.get_device_capability(device)[0] == 9
    if is_hopper and find_spec("flash_attn_interface") is not None:
        known = "FA3" in back_ends.list_flash_attention_impls()
        if known and back_ends.current_flash_attention_impl() is None:
            back_ends.activate_flash_attention_impl("FA3")
    # From torch 2.12 on, grouped heads need a flag; before, torch infers them from the shapes.
    options: Any = {}
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        options["enable_gqa"] = True
    return partial(varlen_attn, **options)  # type: ignore[return-value]


def has_varlen(device: torch.device, dtype: torch.dtype | None) -> bool:
    """Whether a device has variable-length attention for a dtype: NVIDIA GPUs from Ampere on, in 16
    bits."""
    if device.type != "cuda" or dtype not in VARLEN_TYPES or torch.version.hip is not None:
        return False
    if not torch.backends.cuda.is_flash_attention_available():
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def takes_varlen(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether a variable-length kernel accepts these tensors; narrow heads are padded."""
    fits = q.dtype == k.dtype == v.dtype and q.dtype in VARLEN_TYPES
    return fits and max(q.shape[-1], v.shape[-1]) <= 256


def _varlen(
    kernel: Callable[..., Tensor],
    qkv: tuple[Tensor, ...],
    ends: Tensor,
    scale: float | None,
    window: int | None,
) -> Tensor:
    """Attention within the packed documents of all rows; scores between documents are not
    computed."""
    b, _, s, e = qkv[0].shape
    f = qkv[2].shape[-1]
    # The kernel needs one width for q, k and v, a multiple of 8, and on some GPUs has no backward
    # for widths between 192 and 256. Padding with zeros changes neither scores nor sums.
    width = -(-max(e, f) // 8) * 8
    if width > 192:
        width = 256
    flat: list[Tensor] = []
    for x in qkv:
        if x.shape[-1] != width:
            x = F.pad(x, (0, width - x.shape[-1]))
        flat.append(x.transpose(1, 2).flatten(0, 1))

    before = -1  # tokens that a token sees before itself: all
    if window is not None and window < s:
        before = window - 1
    if scale is None:
        scale = e**-0.5
    # The longest document is given as a whole row: a constant, which needs no synchronization with
    # the device.
    y = kernel(*flat, ends, ends, s, s, scale=scale, window_size=(before, 0))
    return y[..., :f].unflatten(0, (b, s)).transpose(1, 2)


def document_mask(documents: Tensor) -> Tensor:
    """The causal mask within documents: documents (b, s) -> bool (b, 1, s, s), True where a query
    sees a key."""
    s = documents.shape[1]
    causal = torch.ones(s, s, dtype=torch.bool, device=documents.device).tril()
    return (documents[:, None, :, None] == documents[:, None, None, :]) & causal


def sliding_window(s: int, window: int, device: torch.device) -> Tensor:
    """The mask where a token sees itself and the window - 1 tokens before it: bool (s, s), True
    where seen."""
    return torch.ones(s, s, dtype=torch.bool, device=device).tril().triu(1 - window)


def cumulative_lengths(documents: Tensor) -> Tensor | None:
    """The starts of the documents (b, s) in the b s packed tokens, and then b s: int32, on the CPU.

    The end of a row ends its last document. The result is padded with b s, as if empty documents
    followed, to b 2^n + 1 numbers: a kernel starts threads for every document, even an empty one,
    and compiled code would otherwise see many sizes. None if the numbers of a row descend, because
    a document may then resume after another.
    """
    changes = documents.diff(dim=1)
    if (changes < 0).any():
        return None
    begins = F.pad(changes != 0, (1, 0), value=True)
    starts = begins.flatten().nonzero().flatten()
    rows = len(documents)
    per_row = -(-len(starts) // rows)  # rounded up, and then to a power of two
    size = rows * (1 << (per_row - 1).bit_length())
    return F.pad(starts.int(), (0, size + 1 - len(starts)), value=documents.numel())
