"""
Estimate the memory that a process needs for training, from the settings and the shape of the model.

The formulas count the tensors that torch allocates. They are pure, and no weights are loaded: a model on torch's meta
device has only shapes. `tests/script/test_memory.py` compares them with peaks that were measured on GPUs. Sizes are in
bytes.
"""

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from ..batch.micro_batches import why_trimmed
from ..errors import InputError
from .console import aligned_rows


GIB = 2**30

_FLOAT32 = 4
# Optimizer states per weight; Adam and the rest have 2
_STATES = {"adafactor": 0, "sgd": 0, "lion": 1, "rmsprop": 1, "adagrad": 1, "ademamix": 3}
_TILE = (4096, 32768)  # tokens and columns of the logits that TRL's output head computes at once
_BLOCK = 64  # weights of a 4-bit tensor with one absolute maximum, in bitsandbytes


@dataclass(frozen=True)
class ModelShape:
    """Numbers of weights of a model, and the sizes that its activations depend on."""

    weights: int  # without an adapter
    linear: int  # of them, in linear layers besides the output head: those that bitsandbytes quantizes
    layer: int  # of the largest layer
    trained: int
    adapter: int
    num_layers: int
    hidden: int
    intermediate: int  # of a token: over all experts that it is sent to
    query: int  # heads times their size
    key_value: int
    vocabulary: int
    trains_head: bool
    ties_head: bool

    @property
    def head(self) -> int:
        """Number of weights of the output head."""
        return self.vocabulary * self.hidden


@dataclass(frozen=True)
class Sharding:
    """How DeepSpeed or FSDP divide a model over the ranks. DeepSpeed's stages: 1 optimizer, 2 gradients, 3 weights."""

    ranks: int = 1
    stage: int = 0  # FSDP divides all of it: 3
    is_deepspeed: bool = False
    offloaded: tuple[str, ...] = ()  # to CPU memory: "optimizer", "param"

    @classmethod
    def of_zero(cls, zero: Mapping[str, Any], ranks: int) -> "Sharding":
        """Return the sharding of the `zero_optimization` of a DeepSpeed configuration."""
        devices = {part: zero.get(f"offload_{part}", {}).get("device") for part in ("optimizer", "param")}
        parts = tuple(part for part, device in devices.items() if device in ("cpu", "nvme"))
        return cls(ranks, zero.get("stage", 0), True, parts)

    def divisor(self, stage: int) -> int:
        return self.ranks if self.stage >= stage else 1


@dataclass(frozen=True)
class Precision:
    """Bytes of a number: of a weight as it is loaded, and of what autocast computes in."""

    weight: int
    compute: int
    quantized_weight: float | None = None  # of a weight of a linear layer


@dataclass(frozen=True)
class BatchShape:
    """Shape of a micro-batch: samples, and tokens of each of its prompts and completions."""

    rows: int
    prompt: int
    completion: int

    @property
    def width(self) -> int:
        return self.prompt + self.completion

    @property
    def tokens(self) -> int:
        return self.rows * self.width


@dataclass(frozen=True)
class Memory:
    """What a process needs during an update, and while it samples."""

    weights: float
    gradients: float
    optimizer: float
    reference: float = 0
    activations: float = 0
    switched: float = 0  # activations with gradient checkpointing switched
    sampling: float = 0  # peak while transformers samples

    @property
    def states(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.reference

    @property
    def update(self) -> float:
        """Peak of an update."""
        return self.states + self.activations


def quantized_weight_bytes(quantization: Any) -> float | None:
    """
    Return the bytes of a quantized weight, constants included, or `None` if bitsandbytes does not quantize.

    In 4 bits, each block of 64 weights has a float32 maximum; nested quantization stores it in 8 bits, and a float32
    for each 256 of them.
    """
    settings = quantization if isinstance(quantization, dict) else getattr(quantization, "__dict__", {})
    has = {name: settings.get(name, settings.get(f"_{name}")) for name in ("load_in_4bit", "load_in_8bit")}
    if has["load_in_4bit"]:
        nested = settings.get("bnb_4bit_use_double_quant")
        return 0.5 + ((1 + _FLOAT32 / 256) if nested else _FLOAT32) / _BLOCK
    return 1.0 if has["load_in_8bit"] else None


def shape_of(
    config: Any, peft_config: Any = None, trust_remote_code: bool = False, attention: str | None = None
) -> ModelShape:
    """
    Return the shape of a model with this configuration, and of its adapter. Neither is changed.

    Raises:
        InputError: If the model or its attention lacks a package, or the model cannot have the adapter.
    """
    try:
        model = _without_weights(config, trust_remote_code, attention)
        with torch.device("meta"):
            return _shape_of(model, copy.deepcopy(peft_config))
    except (ImportError, ValueError) as error:
        of = "The adapter does not fit the model" if peft_config is not None else "The model cannot be made"
        raise InputError(f"{of}: {str(error).strip().splitlines()[0]}") from error


def _shape_of(model: PreTrainedModel, peft_config: Any) -> ModelShape:
    text = model.config.get_text_config()
    head, weights, adapter = model.get_output_embeddings(), _count(model.parameters()), 0
    ties_head = head is not None and head.weight is model.get_input_embeddings().weight
    layers = [module for module in model.modules() if type(module).__name__ in (model._no_split_modules or ())]
    linear = sum(
        module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear) and module is not head
    )
    layer = max((_count(each.parameters()) for each in layers), default=weights)
    if peft_config is not None:
        from peft import get_peft_model

        peft_config.inference_mode = False  # as it is in a saved adapter
        get_peft_model(model, peft_config)
        head = model.get_output_embeddings()  # may be trained as a whole
        adapter = _count(model.parameters()) - weights
    heads = getattr(text, "num_attention_heads", None) or 1
    head_size = getattr(text, "head_dim", None) or text.hidden_size // heads
    intermediate = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    experts = getattr(text, "num_experts_per_tok", None)
    if experts:
        intermediate = experts * (getattr(text, "moe_intermediate_size", None) or intermediate)
    return ModelShape(
        weights=weights,
        linear=linear,
        layer=layer,
        trained=_count(each for each in model.parameters() if each.requires_grad),
        adapter=adapter,
        num_layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        intermediate=intermediate,
        query=heads * head_size,
        key_value=(getattr(text, "num_key_value_heads", None) or heads) * head_size,
        vocabulary=text.vocab_size,
        trains_head=head is not None and any(each.requires_grad for each in head.parameters()),
        ties_head=ties_head,
    )


def plan_memory(
    args: Any,
    config: Any,
    dtype: Any,
    longest_prompt: int,
    peft_config: Any = None,
    quantization_config: Any = None,
    mean_length: int | None = None,
    sharding: Sharding = Sharding(),
) -> dict[str, Memory]:
    """
    Return the memory that a process needs with these settings, by the lengths of its completions, in words.

    `config` and `dtype` (a name or a `torch.dtype`) are the model's. Completions have `max_completion_length` tokens
    and, in a second column, `mean_length` on average. The other arguments are as in [`~plan.dry_run`]. vLLM's share of
    the GPU comes on top.
    """
    limit, rows = args.max_completion_length, args.per_device_train_batch_size
    if mean_length is not None and not 1 <= mean_length <= limit:
        raise InputError(
            f"`dry_run_mean_length` is {mean_length}, but completions have 1 to {limit} tokens "
            "(`max_completion_length`): set it to a number of these, or leave it out."
        )
    weight = torch.empty((), dtype=getattr(torch, str(dtype).removeprefix("torch."))).element_size()
    compute = 2 if args.bf16 or args.fp16 else weight
    quantized = quantized_weight_bytes(quantization_config or getattr(config, "quantization_config", None))
    precision = Precision(compute if sharding.is_deepspeed else weight, compute, quantized)
    attention = (args.model_init_kwargs or {}).get("attn_implementation")
    shape = shape_of(config, peft_config, args.trust_remote_code, attention)
    states = model_states(args.optim, shape, precision, sharding)
    if args.beta != 0 and not shape.adapter:  # with an adapter, the reference is the same model without it
        states = replace(states, reference=states.weights)
    sampling = 0.0
    if not args.use_vllm:
        width = longest_prompt + limit
        cache = 2 * (shape.num_layers + 1) * shape.key_value * precision.weight * width  # a layer's is copied to grow
        last_logits = shape.vocabulary * (precision.weight + 2 * _FLOAT32)
        whole = shape.weights * compute if sharding.stage >= 3 else 0  # TRL gathers the weights
        sampling = states.states - states.gradients + whole + rows * args.steps_per_generation * (cache + last_logits)
    gathered = 0.0
    if sharding.stage >= 3:  # embeddings and head, and a layer with the next one
        gathered = compute * ((1 if shape.ties_head else 2) * shape.head + 2 * shape.layer)

    def of(batches: list[BatchShape]) -> Memory:
        kept, switched = (
            gathered + max(activations(shape, precision, each, checkpointing, attention) for each in batches)
            for checkpointing in (args.gradient_checkpointing, not args.gradient_checkpointing)
        )
        return replace(states, activations=kept, switched=switched, sampling=sampling)

    at_limit = BatchShape(rows, longest_prompt, limit)
    columns = {f"all of {limit} tokens": of([at_limit])}
    if mean_length is not None:
        losses = ["entropy"] if args.entropy_coef or args.top_entropy_quantile < 1 else []
        trimmed = args.micro_batch_layout != "balanced" or why_trimmed(args, losses) is not None
        longest_alone = [replace(at_limit, rows=1), BatchShape(rows, longest_prompt, mean_length)]
        columns[f"mean of {mean_length}"] = of([at_limit] if trimmed else longest_alone)
    return columns


def memory_table(args: Any, columns: Mapping[str, Memory]) -> str:
    """Return the memory as lines, in GiB: a column for each length of completions."""
    switched = f"sum with{'out' if args.gradient_checkpointing else ''} gradient checkpointing"
    rows = {
        "weights": [each.weights for each in columns.values()],
        "gradients": [each.gradients for each in columns.values()],
        "optimizer states": [each.optimizer for each in columns.values()],
        "reference model": [each.reference for each in columns.values()],
        "activations and logits": [each.activations for each in columns.values()],
        "sum": [each.update for each in columns.values()],
        switched: [each.states + each.switched for each in columns.values()],
        "while samples are sampled": [each.sampling for each in columns.values()],
    }
    sizes = {name: [f"{size / GIB:.2f}" for size in row] for name, row in rows.items() if any(row)}
    cells = [(name, [cell.rjust(len(column)) for cell, column in zip(row, columns, strict=True)])
             for name, row in {"completions": list(columns), **sizes}.items()]  # fmt: skip
    where = "process" if args.use_cpu else "GPU"
    lines = [
        f"Memory per {where} in GiB, estimated; micro-batches of {args.per_device_train_batch_size} samples",
        aligned_rows((name, "  ".join(row)) for name, row in cells),
        "  Not counted: images, fragmentation, and the libraries' own memory.",
    ]
    if args.use_vllm and args.vllm_mode == "colocate" and not args.vllm_enable_sleep_mode:
        lines.append(f"  vLLM takes {args.vllm_gpu_memory_utilization:.0%} of the GPU besides.")
    return "\n".join(lines)


def model_states(optim: str, shape: ModelShape, precision: Precision, sharding: Sharding) -> Memory:
    """
    Return the weights, gradients and optimizer states of a rank.

    DeepSpeed's optimizer has a float32 copy of the trained weights. DDP keeps a second copy of the gradients, in the
    buckets that it sends. Adapters are float32, those of a quantized model bfloat16. DeepSpeed's own estimates add
    float32 gradients during its step, when there are no activations.
    """
    weight = precision.weight
    is_quantized = precision.quantized_weight is not None
    of_adapter = 2 if is_quantized else weight if sharding.is_deepspeed else _FLOAT32
    quantized = shape.linear if is_quantized else 0
    of_trained = of_adapter if shape.adapter else weight
    trained = shape.trained * of_trained
    weights = (shape.weights - quantized) * weight + quantized * (precision.quantized_weight or 0)
    states = next((count for name, count in _STATES.items() if name in optim), 2)
    master = shape.trained * _FLOAT32 if sharding.is_deepspeed else 0
    state = 1 if "8bit" in optim else _FLOAT32 if sharding.is_deepspeed else of_trained
    optimizer = (shape.trained * states * state + master) / sharding.divisor(1)
    buckets = trained if sharding.ranks > 1 and sharding.stage == 0 else 0
    return Memory(
        weights=0 if "param" in sharding.offloaded else (weights + shape.adapter * of_adapter) / sharding.divisor(3),
        gradients=trained / sharding.divisor(2) + buckets,
        optimizer=0 if "optimizer" in sharding.offloaded else optimizer,
    )


def activations(
    shape: ModelShape,
    precision: Precision,
    batch: BatchShape,
    checkpointing: bool,
    attention: str | None = None,
) -> float:
    """
    Return the largest size of what a micro-batch keeps and computes besides weights, gradients and optimizer states.

    With gradient checkpointing, the inputs of all layers are kept, and what one layer keeps is computed again in the
    backward pass. The peak is at the end of the forward pass, at the output head, or in a layer, whose gradients come
    on top of it. Without checkpointing, all layers keep theirs, and their weights as autocast casts them.
    """
    stream = precision.weight * shape.hidden  # the residual stream has the type of the embeddings
    cast = precision.compute
    is_quantized = precision.quantized_weight is not None
    mask = (1 + cast) * batch.rows * batch.width**2 if attention in (None, "sdpa") else 0
    kept = batch.tokens * _kept_per_token(shape, precision)
    wide = 3 * cast + (_FLOAT32 if shape.adapter else 0)  # an adapter's input has the adapter's type
    gradients = batch.tokens * (wide * shape.intermediate + stream)
    head = _head(shape, precision, batch)
    head_gradient = _FLOAT32 * shape.head if shape.trains_head else 0
    pending = head_gradient if shape.ties_head else 0  # until the embeddings have theirs
    casts = cast * shape.layer if is_quantized or cast != precision.weight else 0  # of a layer's weights
    if not checkpointing:
        all_casts = 0 if is_quantized else casts * shape.num_layers  # quantized ones are computed again
        return mask + all_casts + kept * shape.num_layers + max(head_gradient + head, gradients + pending)
    inputs = batch.tokens * stream * shape.num_layers
    cached = 0 if is_quantized or shape.adapter else casts * shape.num_layers  # autocast keeps trained ones for a pass
    return mask + inputs + max(cached + head, head_gradient + head, casts + kept + gradients + pending)


def _kept_per_token(shape: ModelShape, precision: Precision) -> float:
    """
    Return what a layer keeps of a token for its backward pass.

    Two norms keep their float32 input and their output before the scale. Under autocast, each of the linear layers
    keeps an input of its own: query, key, value, attention output, gate, up (six of the model's width), and down.
    Attention keeps query, key and value, with keys repeated for all heads, and its output; the activation function
    keeps its input, its output and what it is multiplied by.
    """
    norms = 2 * (_FLOAT32 + precision.weight) * shape.hidden
    linear = precision.compute * (6 * shape.hidden + shape.intermediate)
    return norms + linear + precision.compute * (4 * shape.query + 3 * shape.intermediate)


def _head(shape: ModelShape, precision: Precision, batch: BatchShape) -> float:
    """
    Return what TRL's fused output head needs: a tile of logits, a tile of weights, hidden states and their gradient.

    The whole logits are never there, and only completions are scored.
    """
    tokens = batch.rows * batch.completion
    columns = min(shape.vocabulary, _TILE[1])
    tile = min(tokens, _TILE[0]) * columns * precision.compute
    weights = columns * shape.hidden * precision.compute if precision.compute != precision.weight else 0
    hidden = tokens * shape.hidden * (precision.weight + _FLOAT32 + precision.compute)
    return tile + weights + hidden


def _without_weights(config: Any, trust_remote_code: bool, attention: str | None) -> PreTrainedModel:
    """Return a model on the meta device, of the class that its configuration names."""
    name = (config.architectures or [""])[0]
    known = getattr(transformers, name, None)
    config = copy.deepcopy(config)  # the model writes to it
    if attention is not None:
        config._attn_implementation = attention
    with torch.device("meta"):
        if known is not None:
            return known(config)
        return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)


def _count(parameters: Iterable[nn.Parameter]) -> int:
    return sum(each.numel() for each in parameters)
