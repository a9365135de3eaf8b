"""From exported tensors to what a worker holds: names of recipes, casts, the published quantizations, what may be dropped."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from syncguard.errors import ManifestError
from syncguard.export.checkpoint import export_checkpoint
from syncguard.export.forms import ResidentForms, as_torch, covers
from syncguard.export.quantize import computed
from syncguard.export.stream import ManifestBuilder
from syncguard.layout.published import Recipe, SourceBox, largest, recipe_of, requantized
from syncguard.manifest.model import Changed
from syncguard.spec import Box, WeightVersion

V = WeightVersion("run", 1)
GENERATOR = torch.Generator().manual_seed(3)


def weights(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, generator=GENERATOR).to(dtype)


@pytest.mark.parametrize(
    "recipe",
    [
        largest(["a.weight_scale", "b.weight_scale"]),
        requantized("a.weight", "a.s", ["a.s", "b.s", "c.s"], on_device=True),
        Recipe("fp8_per_row", "values", (SourceBox("m.0.w", Box((0, 64), (4, 8))),), "bfloat16"),
        Recipe("fp8_per_tensor", "scale", (SourceBox("a", Box((0,), (1,))), SourceBox("b")), "float16"),
    ],
)
def test_a_name_says_its_recipe_and_reads_back_as_it(recipe):
    assert recipe_of(recipe.named("model.x.weight")) == recipe


@pytest.mark.parametrize(
    "name",
    [
        "model.x.weight",
        "w#sum.value(a)",
        "w#max.values(a)",
        "w#max.value()",
        "w#max.value(a; )",
        "w#max.value(a[)",
        "w#max.value(a[1:0])",
        "w#max.value(a[:2])",
        "w#fp8_per_row:float7.values(a)",
        "w#max.value(a) and more",
        "w#max.value(__import__('os'))",
    ],
)
def test_what_is_no_recipe_of_the_closed_set_is_an_ordinary_name(name):
    assert recipe_of(name) is None


def test_requantization_is_what_torch_makes_of_the_engines_own_expression():
    values = (weights(16, 8, dtype=torch.float32) * 100).to(torch.float8_e4m3fn)
    own, other = torch.tensor(2.345e-6), torch.tensor(7.1e-6)
    recipe = requantized("w", "s", ["s", "t"], on_device=False)
    made = computed(recipe, [values, own, other], "w")
    wide = values.to(torch.float16) * own  # per_tensor_dequantize, quantization/utils.py 0.5.23:128
    due = (wide.float() * (1.0 / other)).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(made.view(torch.uint8), due.view(torch.uint8))
    half = computed(requantized("w", "s", ["s", "t"], on_device=True), [values, own, other], "w")
    assert not torch.equal(half.view(torch.uint8), made.view(torch.uint8))


def test_quantizing_brings_the_largest_value_to_the_largest_fp8_and_a_row_of_zeros_to_zeros():
    tensor = weights(6, 32)
    tensor[2] = 0
    values, scale = (
        computed(Recipe("fp8_per_row", output, (SourceBox("w"),)), [tensor], "w") for output in ("values", "scale")
    )
    assert scale.shape == (6, 1)
    assert not values[2].float().any()
    assert (values.float().abs().amax(dim=1)[[0, 1, 3, 4, 5]] == 448).all()
    assert torch.allclose(values.float() * scale, tensor.float(), atol=0.13 * float(tensor.abs().max()))


def test_an_exact_cast_is_made_and_named_and_a_rounded_one_says_that_it_rounds():
    forms = {"gate": "float32", "norm": "bfloat16", "same": "bfloat16"}
    builder = ManifestBuilder(V, forms=forms)
    gate, norm, same = weights(4, 4), weights(8, dtype=torch.float32), weights(3)
    builder.add_many({"gate": gate, "norm": norm, "same": same}.items())
    made = builder.build(changed=["gate", "norm"])
    assert "1 cast bfloat16 to float32 exactly" in made.source
    assert "1 cast float32 to bfloat16 rounded to nearest even" in made.source
    plain = ManifestBuilder(V)
    plain.add_many({"gate": gate.float(), "norm": norm.to(torch.bfloat16), "same": same}.items())
    due = plain.build()
    assert [(e.fqn, e.dtype, e.digest) for e in made.entries] == [(e.fqn, e.dtype, e.digest) for e in due.entries]
    # Rounding may hide a change, so that nothing is said of it: an equal digest is then no frozen export.
    assert [entry.changed for entry in made.entries] == [Changed.CHANGED, Changed.UNKNOWN, Changed.UNCHANGED]


@pytest.mark.parametrize(("dtype", "held"), [(torch.int8, "float32"), (torch.float8_e4m3fn, "bfloat16")])
def test_quantized_values_are_never_cast(dtype, held):
    builder = ManifestBuilder(V, forms={"w": held})
    with pytest.raises(ManifestError, match="no published cast"):
        builder.add("w", torch.zeros(2, 2).to(dtype))


def test_a_source_is_replaced_only_when_its_forms_show_all_of_it():
    top, bottom = (SourceBox("w", Box((start, 0), (2, 8))) for start in (0, 2))
    halves = [Recipe("fp8_per_row", output, (part,)) for part in (top, bottom) for output in ("values", "scale")]
    names = {recipe.named("w"): "float8_e4m3fn" if recipe.output == "values" else "float32" for recipe in halves}
    whole = ManifestBuilder(V, forms=names)
    assert whole.add("w", weights(4, 8)) is None
    assert {entry.fqn for entry in whole.build().entries} == set(names)
    part = ManifestBuilder(V, forms={name: dtype for name, dtype in names.items() if "[0:2" in name})
    part.add("w", weights(4, 8))
    assert "w" in {entry.fqn for entry in part.build().entries}


@pytest.mark.parametrize(
    "name",
    [
        Recipe("fp8_per_row", "scale", (SourceBox("w"),)).named("w"),
        Recipe("fp8_per_tensor", "values", (SourceBox("v"), SourceBox("w"))).named("v"),
    ],
)
def test_a_tensor_that_only_takes_part_in_a_scale_stays_in_the_manifest(name):
    builder = ManifestBuilder(V, forms={name: "float32"})
    builder.add_many({"v": weights(2, 8), "w": weights(2, 8)}.items())
    assert "w" in {entry.fqn for entry in builder.build().entries}


def test_a_form_whose_source_never_came_is_not_in_the_manifest():
    name = largest(["a.s", "b.s"]).named("m.s")
    builder = ManifestBuilder(V, forms={name: "float32", "other": "bfloat16"})
    builder.add("other", weights(2))
    builder.add("a.s", torch.tensor(1.0))
    # What was exported stays, as it was: without it nobody would miss it.
    assert {entry.fqn for entry in builder.build().entries} == {"a.s", "other"}


def test_a_name_is_refused_twice_also_where_only_its_form_is_held():
    name = Recipe("fp8_per_row", "values", (SourceBox("w"),)).named("w")
    builder = ManifestBuilder(V, forms={name: "float8_e4m3fn"})
    builder.add("w", weights(2, 4))
    with pytest.raises(ManifestError, match="a name twice"):
        builder.add("w", weights(2, 4))


def test_a_folder_and_named_tensors_give_one_manifest_in_the_held_forms(tmp_path):
    from safetensors.torch import save_file

    tensors = {"q.weight": weights(4, 8), "gate": weights(3, 5), "n": weights(7)}
    save_file(tensors, tmp_path / "model.safetensors")
    row = Recipe("fp8_per_row", "values", (SourceBox("q.weight", Box((0, 0), (4, 8))),), "bfloat16").named("q.weight")
    forms = {row: "float8_e4m3fn", "gate": "float32", "n": "bfloat16"}
    builder = ManifestBuilder(V, forms=forms)
    builder.add_many(tensors.items())
    folder = export_checkpoint(tmp_path, version=V, forms=forms)
    assert [(e.fqn, e.digest) for e in folder.entries] == [(e.fqn, e.digest) for e in builder.build().entries]
    assert "computed by fp8_per_row" in folder.source


def test_boxes_that_overlap_may_cover_together_and_a_hole_shows():
    assert covers((4, 4), [Box((0, 0), (3, 4)), Box((2, 0), (2, 4))])
    assert not covers((4, 4), [Box((0, 0), (3, 4)), Box((3, 0), (1, 3))])


def test_raw_bits_become_torch_tensors_without_a_copy():
    raw = np.arange(6, dtype=np.uint16).reshape(2, 3)
    live = as_torch(raw, "bfloat16")
    assert live.dtype is torch.bfloat16
    assert live.data_ptr() == raw.ctypes.data
    assert as_torch(np.uint32(5).reshape(()), "float32").shape == ()


def test_without_forms_everything_stays_as_exported():
    tensor = weights(2, 2)
    (made,) = ResidentForms({}).offer("w", tensor, "bfloat16")
    assert made.tensor is tensor
    assert not made.lossy
