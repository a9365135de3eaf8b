"""A manifest from named tensors as they are sent: digest each where it lies, just before or after the push."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from msgspec import structs

from syncguard.digest import ALGORITHM, DEFAULT_KEY_SEED, DigestJob, engine_for
from syncguard.errors import ManifestError, UnsupportedError
from syncguard.export.checkpoint import check_order
from syncguard.export.entry import digest_jobs, entry_of, stated_changes
from syncguard.export.forms import ResidentForms
from syncguard.manifest.codec import seal
from syncguard.manifest.model import Manifest
from syncguard.spec import dtype_named

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from syncguard.digest import PartialDigest
    from syncguard.manifest.model import ExemptPolicy, ManifestEntry
    from syncguard.spec import Box, DType, WeightVersion


class ManifestBuilder:
    """Collects tensors under checkpoint names; what is digested is what is in memory when it is added.

    Args:
        version: Weight version of the export.
        key_seed: Key seed of the digests.
        previous: Manifest of the previous version, to order this one and to note what certainly changed.
        forms: Logical name → dtype of what the workers hold (`Gate.forms()`): tensors are cast and quantized as the engine
            does before they are digested. Sources of a quantized form must not change until all of them were added.

    Raises:
        VersionOrderError: `previous` is not older.
    """

    def __init__(
        self,
        version: WeightVersion,
        key_seed: bytes = DEFAULT_KEY_SEED,
        *,
        previous: Manifest | None = None,
        forms: Mapping[str, str] | None = None,
    ) -> None:
        """Start with no tensor."""
        check_order(version, previous)
        self.version = version
        self.key_seed = key_seed
        self._previous = previous
        self._forms = ResidentForms(forms or {})
        self._added: set[str] = set()
        self._entries: dict[str, ManifestEntry] = {}

    def __len__(self) -> int:
        """Return the number of tensors digested."""
        return len(self._entries)

    def add(self, name: str, tensor: Any, *, dtype: str = "", boxes: Sequence[Box] = ()) -> ManifestEntry | None:
        """Digest one whole tensor; see `add_many`, which is faster for many small ones.

        Returns:
            Its entry, None when workers hold it only in a quantized form.
        """
        made = self._add([(name, tensor, dtype, tuple(boxes))])
        return next((entry for entry in made if entry.fqn == name), None)

    def add_many(self, named: Iterable[tuple[str, Any]]) -> None:
        """Digest whole tensors in one batch.

        Args:
            named: Checkpoint name and tensor, torch (any device) or numpy; read in place, nothing of it is kept.

        Raises:
            ManifestError: A name is empty or was added before.
            UnsupportedError: A distributed tensor, of which this process holds a part only.
            DigestInputError: A dtype without a rule, or memory that cannot be read.
        """
        self._add([(name, tensor, "", ()) for name, tensor in named])

    def build(
        self, *, changed: Collection[str] | None = None, exempt: Sequence[ExemptPolicy] = (), source: str = ""
    ) -> Manifest:
        """Return the sealed manifest of all tensors added so far.

        Args:
            changed: Names that the optimizer changed, all others unchanged; None when it does not say.
            exempt: Tensors that workers are not expected to hold.
            source: Where the tensors came from, for people.

        Raises:
            ManifestError: No tensor was added, or a name in `changed` was not.
        """
        left = self._digested([(formed.name, formed.tensor, formed.dtype, ()) for formed in self._forms.rest()])
        self._entries.update((entry.fqn, entry) for entry in left)
        if not self._entries:
            raise ManifestError("manifest of no tensor", expected="1 or more tensors", todo="add what is pushed")
        told = stated_changes(
            self._entries,
            exported=self._added,
            lossy=self._forms.lossy,
            changed=changed,
            previous=self._previous,
            key_seed=self.key_seed,
        )
        formed = self._forms.describe()
        return seal(
            Manifest(
                version=self.version,
                algorithm=ALGORITHM,
                key_seed_hex=self.key_seed.hex(),
                entries=tuple(
                    structs.replace(entry, changed=told[fqn]) for fqn, entry in sorted(self._entries.items())
                ),
                exempt=tuple(exempt),
                source=(source or "named tensors") + (f"; {formed}" if formed else ""),
            )
        )

    def _add(self, items: Sequence[tuple[str, Any, str, tuple[Box, ...]]]) -> list[ManifestEntry]:
        # All is checked and digested before anything is kept: a refused batch leaves the builder as it was.
        names: set[str] = set()
        given: list[tuple[str, Any, str, tuple[Box, ...]]] = []
        for name, tensor, dtype_name, boxes in items:
            if not name or name in self._added or name in names:
                raise ManifestError(
                    "a name twice" if name else "tensor without a name",
                    expected="each checkpoint name once",
                    found=name,
                    todo="start a new builder for each weight version",
                )
            names.add(name)
            _refuse_distributed(name, tensor)
            dtype = dtype_named(dtype_name or str(tensor.dtype))
            given += [
                (formed.name, formed.tensor, formed.dtype, boxes if formed.name == name else ())
                for formed in self._forms.offer(name, tensor, dtype.name)
            ]
        twice = [fqn for fqn, times in Counter(item[0] for item in given).items() if times > 1 or fqn in self._entries]
        if twice:
            raise ManifestError(
                "a name twice",
                expected="each expert once, alone or in a tensor of all of them",
                found=twice[0],
                todo="export one of the two",
            )
        made = self._digested(given)
        self._added |= names
        self._entries.update((entry.fqn, entry) for entry in made)
        return made

    def _digested(self, items: Sequence[tuple[str, Any, str, tuple[Box, ...]]]) -> list[ManifestEntry]:
        groups: list[tuple[str, DType, tuple[int, ...], tuple[Box, ...], list[DigestJob]]] = []
        for name, tensor, dtype_name, boxes in items:
            dtype = dtype_named(dtype_name)
            shape = tuple(int(n) for n in tensor.shape)
            groups.append((name, dtype, shape, boxes, digest_jobs(name, tensor, dtype, shape, boxes)))
        partials = iter(_digest([job for group in groups for job in group[4]], self.key_seed))
        return [
            entry_of(name, dtype, shape, boxes, [next(partials) for _ in own], key_seed=self.key_seed)
            for name, dtype, shape, boxes, own in groups
        ]


def _digest(jobs: Sequence[DigestJob], key_seed: bytes) -> list[PartialDigest]:
    """Return the partial digests in the order of the jobs; one batch for each device."""
    devices = [str(getattr(job.view, "device", "cpu")) for job in jobs]
    made: dict[int, PartialDigest] = {}
    for device in sorted(set(devices)):
        places = [place for place, on in enumerate(devices) if on == device]
        partials = engine_for(device).partials([jobs[place] for place in places], key_seed=key_seed)
        made |= dict(zip(places, partials, strict=True))
    return [made[place] for place in range(len(jobs))]


def _refuse_distributed(name: str, tensor: Any) -> None:
    # A DTensor's shape is the whole tensor's, its memory only this rank's part.
    if hasattr(tensor, "placements") and hasattr(tensor, "full_tensor"):
        raise UnsupportedError(
            "distributed tensor",
            expected="a whole tensor in this process",
            found=type(tensor).__name__,
            where=name,
            todo="export the shards of each rank and combine them",
        )
