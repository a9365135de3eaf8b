"""What a rank reads: the digest jobs of a layout, and the answers to its claims.

Tensors are duck-typed (`data_ptr`, `shape`, `detach`): torch is used where the engine has it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from syncguard.digest import DigestJob, PartialDigest, engine_for
from syncguard.engines.rank_scratch import ScratchReader
from syncguard.layout.derived import check_derived
from syncguard.layout.fp4 import KERNEL_SCRATCH
from syncguard.layout.ops import apply_ops
from syncguard.layout.packed import SHAPE_ON_LOAD
from syncguard.layout.repack import moves_bytes
from syncguard.manifest.model import CheckResult
from syncguard.spec import Box, dtype_named

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncguard.layout.model import Derived, Padding, RankLayout


_COMES_AND_GOES: Final = frozenset({KERNEL_SCRATCH, SHAPE_ON_LOAD})
"""Exempt state of sound workers that need not stay what it was at first: locks of a kernel, which runs on a stream of its
own, and what the order of an update leaves where nobody reads it."""


@dataclass(slots=True)
class Bound:
    """A layout with the live tensors it was read from, and the views that its claims lead to.

    A claim without a job needs bytes to be moved: `scratch` answers those, in their order.
    """

    layout: RankLayout
    tensors: Mapping[str, Any]
    jobs: list[DigestJob] = field(default_factory=list)
    binding_job: list[int | None] = field(default_factory=list)
    padding_job: list[int | None] = field(default_factory=list)
    exempt_jobs: list[DigestJob] = field(default_factory=list)
    scratch: ScratchReader | None = None
    read_bytes: int = 0


def bound_of(layout: RankLayout, tensors: Mapping[str, Any]) -> Bound:
    """Make the digest jobs of a layout; claims on the same memory at the same place share one job."""
    bound = Bound(layout, tensors)
    dtypes = {resident.name: resident.dtype for resident in layout.residents}
    seen: dict[Any, int] = {}

    def job(view: Any, dtype_name: str, shape: tuple[int, ...], box: Box, fqn: str) -> int:
        # By address, not by name: an alias may be a view of another part of the same storage.
        key = (str(view.device), view.data_ptr(), tuple(view.stride()), dtype_name, shape, box)
        if key not in seen:
            seen[key] = len(bound.jobs)
            bound.jobs.append(DigestJob(view, dtype_named(dtype_name), shape, box, fqn))
            bound.read_bytes += box.count * dtype_named(dtype_name).itemsize_bytes
        return seen[key]

    for binding in layout.bindings:
        tensor = binding.shard.tensor
        if moves_bytes(binding.ops):
            bound.binding_job.append(None)
            continue
        view = _view(tensors[binding.resident], binding.ops)
        bound.binding_job.append(job(view, tensor.dtype, tensor.shape, binding.shard.box, tensor.fqn))
    for padding in layout.paddings:
        if moves_bytes(padding.ops):
            bound.padding_job.append(None)
            continue
        view = _view(tensors[padding.resident], padding.ops)
        shape = tuple(int(n) for n in view.shape)
        bound.padding_job.append(job(view, dtypes[padding.resident], shape, Box.whole(shape), padding.resident))
    _add_exempt(bound, dtypes)
    bindings = [binding for binding in layout.bindings if moves_bytes(binding.ops)]
    paddings = [padding for padding in layout.paddings if moves_bytes(padding.ops)]
    if bindings or paddings:
        bound.scratch = ScratchReader(bindings, paddings, tensors)
        bound.read_bytes += bound.scratch.read_bytes
    return bound


def _add_exempt(bound: Bound, dtypes: Mapping[str, str]) -> None:
    """Make the jobs of exempt tensors, which must stay what they were at first."""
    for exempt in bound.layout.exempt:
        if exempt.reason in _COMES_AND_GOES:
            continue
        view = _view(bound.tensors[exempt.resident], ())
        shape = tuple(int(n) for n in view.shape)
        if exempt.resident in dtypes and Box.whole(shape).count:
            dtype = dtype_named(dtypes[exempt.resident])
            bound.exempt_jobs.append(DigestJob(view, dtype, shape, Box.whole(shape), exempt.resident))
            bound.read_bytes += Box.whole(shape).count * dtype.itemsize_bytes


def _view(tensor: Any, ops: tuple[Any, ...]) -> Any:
    return apply_ops(tensor.detach() if hasattr(tensor, "detach") else tensor, ops)


def digest_jobs(jobs: Sequence[DigestJob], key_seed: bytes) -> list[PartialDigest]:
    """Digest all jobs, one batch a device type."""
    by_device: dict[str, list[int]] = {}
    for index, job in enumerate(jobs):
        device = getattr(getattr(job.view, "device", None), "type", "cpu")
        by_device.setdefault(device, []).append(index)
    results: list[PartialDigest] = [PartialDigest.zero()] * len(jobs)
    for device, indices in by_device.items():
        partials = engine_for(device).partials([jobs[i] for i in indices], key_seed=key_seed)
        for index, partial in zip(indices, partials, strict=True):
            results[index] = partial
    return results


def padding_result(claim: Padding, view: Any, partial: PartialDigest) -> CheckResult:
    """Judge a must-be-constant view.

    All bytes are zero exactly when the keyed sum is zero, up to the collision bound of the digest; bytes are counted
    only where it is not, or where another value is due.
    """
    if claim.value_byte == 0 and partial.data == 0:
        return CheckResult(ok=True)
    wrong = _bytes_unlike(view, claim.value_byte)
    if not wrong:
        return CheckResult(ok=claim.value_byte != 0, detail="" if claim.value_byte else "changed while it was read")
    return CheckResult(ok=False, wrong_count=len(wrong), detail=f"first at {wrong[0]}")


def _bytes_unlike(view: Any, value_byte: int) -> list[tuple[int, ...]]:
    """Return the indices of elements with a byte that is not `value_byte`."""
    import numpy as np

    if hasattr(view, "detach"):
        import torch

        view = view.detach().contiguous().cpu()
        itemsize = view.element_size()
        raw = view.reshape(-1).view(torch.uint8).numpy()
    else:
        itemsize = view.dtype.itemsize
        raw = np.ascontiguousarray(view).reshape(-1).view(np.uint8)
    wrong = np.flatnonzero((raw.reshape(-1, itemsize) != value_byte).any(axis=1))
    return [tuple(int(i) for i in np.unravel_index(w, tuple(view.shape))) for w in wrong.tolist()]


def derived_result(claim: Derived, tensors: Mapping[str, Any]) -> CheckResult:
    """Judge a derived-state claim; a rule without a check does not hold."""
    result = check_derived(claim, tensors)
    return CheckResult(ok=result.ok, wrong_count=result.wrong_count, detail=result.detail)
