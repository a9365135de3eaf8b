"""The demo's trainer: a small Transformers Qwen3 that takes real optimizer steps and exports what it has.

Weights are trained in fp32; a bf16 export is cast from them, and the frozen forward scores the *exported* weights, as
a trainer with mixed precision does. Everything follows from the seed.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

import numpy as np
import torch
from safetensors.torch import save_file
from torch.nn import functional
from transformers import Qwen3Config, Qwen3ForCausalLM

from syncguard.errors import UsageError
from syncguard.spec import WeightVersion

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

Size = Literal["tiny", "small"]

SIZES: Final[Mapping[str, Mapping[str, int]]] = {
    "tiny": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 96,
        "vocab_size": 130,
    },
    "small": {
        "hidden_size": 256,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 1024,
        "vocab_size": 4099,
    },
}
"""Shapes of the demo models: 0.16 and 11 million parameters; vocabularies that engines must pad."""

_INITIALIZER_RANGE: Final = {"tiny": 0.2, "small": 0.06}
"""Wide enough that the logits of two versions differ by far more than the noise of a forward pass."""

_BITS: Final = {2: torch.int16, 4: torch.int32}


class Scored(Protocol):
    """What the trainer trains on and scores: a replay record is one."""

    @property
    def input_ids(self) -> Any:
        """Prompt then response, int `[length]`."""

    @property
    def prompt_length(self) -> int:
        """Index of the first response token."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One response of a worker, as the trainer needs it."""

    input_ids: tuple[int, ...]
    prompt_length: int


@dataclass(frozen=True, slots=True)
class StepReport:
    """What an optimizer step did.

    Attributes:
        version: The weight version that it made.
        loss: Value of the objective before the step.
        changed: Exported tensors of which at least one bit differs from the previous version, sorted.
        unchanged: The others, sorted.
    """

    version: WeightVersion
    loss: float
    changed: tuple[str, ...]
    unchanged: tuple[str, ...]


class Trainer:
    """Policy, optimizer and frozen forward in one process.

    Args:
        size: `tiny` or `small`.
        dtype: Export dtype, `float32` or `bfloat16`.
        seed: Seed of the initial weights.
        learning_rate: AdamW step; the default moves every tensor in bf16 too.
        tie_word_embeddings: Share embedding and head; the export then has no `lm_head.weight`.
        run_id: Run part of the weight versions.

    Raises:
        UsageError: An unknown size or dtype.
    """

    def __init__(
        self,
        *,
        size: Size = "tiny",
        dtype: str = "float32",
        seed: int = 0,
        learning_rate: float = 2e-3,
        tie_word_embeddings: bool = False,
        run_id: str = "demo",
    ) -> None:
        """Build the model and its optimizer at step 0."""
        if size not in SIZES or dtype not in ("float32", "bfloat16"):
            raise UsageError(
                "demo model", expected=f"size {' '.join(SIZES)}, dtype float32 bfloat16", found=f"{size} {dtype}"
            )
        self.config = Qwen3Config(
            **SIZES[size],
            max_position_embeddings=512,
            tie_word_embeddings=tie_word_embeddings,
            initializer_range=_INITIALIZER_RANGE[size],
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
        )
        self.config.architectures = ["Qwen3ForCausalLM"]
        self._export_dtype: torch.dtype = getattr(torch, dtype)
        self.config.dtype = self._export_dtype
        self.version = WeightVersion(run_id, 0)
        self.model = _seeded_model(self.config, seed)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=learning_rate, weight_decay=0.0)
        self._exported = self._cast()

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary, without padding."""
        return int(self.config.vocab_size)

    def train_step(self, samples: Sequence[Scored], rewards: Sequence[float]) -> StepReport:
        """Take one policy-gradient step: minus the reward-weighted mean log-probability of the responses.

        Args:
            samples: Responses with their prompts.
            rewards: One per sample; balanced ones (sum 0) keep the demo's policy from drifting.

        Returns:
            The new version, and which exported tensors the step changed, by their bits.

        Raises:
            UsageError: No sample, or another number of rewards.
        """
        if not samples or len(samples) != len(rewards):
            raise UsageError("training batch", expected="as many rewards as samples", found=f"{len(rewards)}")
        self.model.train()
        self._optimizer.zero_grad(set_to_none=True)
        loss = -sum(
            reward * _response_logprobs(self.model, sample).mean()
            for sample, reward in zip(samples, rewards, strict=True)
        ) / len(samples)
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        self._optimizer.step()
        before, self._exported = self._exported, self._cast()
        changed = [name for name, tensor in self._exported.items() if not _same_bits(tensor, before[name])]
        self.version = WeightVersion(self.version.run_id, self.version.step + 1)
        return StepReport(
            version=self.version,
            loss=float(loss.detach()),
            changed=tuple(sorted(changed)),
            unchanged=tuple(sorted(self._exported.keys() - set(changed))),
        )

    def export(self) -> dict[str, torch.Tensor]:
        """Return checkpoint name → tensor in the export dtype; the tensors are the caller's own."""
        return {name: tensor.clone() for name, tensor in self._exported.items()}

    def score(self, sample: Scored) -> npt.NDArray[np.float64]:
        """Score a saved response once with the frozen exported weights (C).

        Evaluation mode, no gradient; the training mode is restored afterwards, whatever happens.

        Returns:
            Natural log-probability of each response token, in nats: fp32 log-softmax of `logits[t - 1]` at token t.
        """
        frozen = self._frozen()
        was_training = frozen.training
        frozen.eval()
        try:
            with torch.no_grad():
                return _response_logprobs(frozen, sample).double().numpy()
        finally:
            frozen.train(was_training)

    def score_twice(self, sample: Scored) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Return C0 and C1: two passes, whose difference is the trainer's repeat noise."""
        return self.score(sample), self.score(sample)

    def save_checkpoint(self, folder: Path) -> Path:
        """Write `config.json` and `model.safetensors`; complete or not there at all.

        An older checkpoint of the same name is replaced.
        """
        folder.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            save_file(self._exported, beside / "model.safetensors", metadata={"format": "pt"})
            self.config.save_pretrained(beside)
            beside.chmod(0o755)
            if folder.exists():
                old = beside / "replaced"
                folder.replace(old)
                beside.replace(folder)
                shutil.rmtree(folder / "replaced")
            else:
                beside.replace(folder)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
        return folder

    def _cast(self) -> dict[str, torch.Tensor]:
        return {
            name: parameter.detach().to(self._export_dtype, copy=True)
            for name, parameter in self.model.named_parameters()
        }

    def _frozen(self) -> Any:
        """Return the model that holds the exported bits: the policy itself in fp32, a cast copy otherwise."""
        if self._export_dtype == torch.float32:
            return self.model
        with torch.device("meta"):
            frozen = Qwen3ForCausalLM(self.config)
        frozen.load_state_dict(self._exported, strict=False, assign=True)
        frozen.tie_weights()
        # Rotary frequencies stay fp32: casting the whole module would round the positions as well.
        frozen.model.rotary_emb = self.model.model.rotary_emb
        return frozen


def balanced_rewards(count: int) -> list[float]:
    """Return artificial rewards -1, +1, -1 …; a zero ends an odd number, so that the sum is zero."""
    rewards = [1.0 if index % 2 else -1.0 for index in range(count)]
    return [*rewards[:-1], 0.0] if count % 2 else rewards


def _seeded_model(config: Any, seed: int) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config).float()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                # Transformers starts norms at one, where a swapped or stale norm would not show.
                if name.endswith("norm.weight"):
                    parameter.uniform_(0.5, 1.5)
    return model


def _response_logprobs(model: Any, sample: Scored) -> torch.Tensor:
    """Return fp32 log-probabilities of the response tokens, `[response]`."""
    ids = torch.tensor(np.asarray(sample.input_ids), dtype=torch.int64)
    logits = model(input_ids=ids.unsqueeze(0), use_cache=False).logits[0, sample.prompt_length - 1 : -1]
    logprobs = functional.log_softmax(logits.float(), dim=-1)
    return logprobs.gather(1, ids[sample.prompt_length :].unsqueeze(1)).squeeze(1)


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    # By bits, not by value: -0.0 equals 0.0, and NaN differs from itself.
    bits = _BITS[left.element_size()]
    return torch.equal(left.view(bits), right.view(bits))
