"""Drawing in a compiled step: one operator, which draws what an eager step does. Graphs: tests/test_cuda.py."""

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_flatten

import torchsbp
from torchsbp.errors import UsageError
from torchsbp.sampling import operators
from torchsbp.sampling.samplers import SAMPLERS

from ..counting import counting_backend
from ..models import MODELS
from ..steps import GRID, entry_of

CASES = [
    ("vit", {}),
    ("vit", {"attention": "head", "per_sample": True, "per_block": False}),
    ("vit", {"config": GRID}),
    ("convnext", {}),
    ("convnext", {"config": GRID}),
    ("swin", {}),
    ("swin", {"keep_ratio": [0.25, 0.5, 0.25, 1.0]}),
    ("swin, padded", {"config": GRID}),
    ("video swin", {"sampler": "frames"}),
]
draw = torch.ops.torchsbp.draw


def patched(name: str, **options: Any) -> nn.Module:
    return torchsbp.apply(MODELS[name].model(), **{"keep_ratio": 0.5, "scale": "none"} | options)


def compiled(model: nn.Module, **options: Any) -> tuple[Any, list[int]]:
    """The entry, where masks are drawn, and the number of operators that draw in each of its graphs."""
    torch._dynamo.reset()
    backend, counts = counting_backend((draw.default,))
    return torch.compile(entry_of(model), fullgraph=True, backend=backend, **options), counts


def assert_same(model: nn.Module, eager: nn.Module) -> None:
    (found, its), (expected, theirs) = (tree_flatten(entry_of(m).sbp.masks.drawn) for m in (model, eager))
    assert its == theirs
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b) if isinstance(b, Tensor) else a == b
    assert entry_of(model).sbp_step == entry_of(eager).sbp_step


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name, options", CASES, ids=str)
def test_one_operator_draws_what_is_drawn_in_eager_mode(name, options, padded):
    """Step after step, without recompilation; also where images are smaller than their batch."""
    model = patched(name, **options)
    eager, x = copy.deepcopy(model), MODELS[name].images(3)
    run, counts = compiled(model)
    height, width = x.shape[-2:]
    with torch._dynamo.config.patch(error_on_recompile=True):
        for i in range(4):
            for m, forward in ((model, run), (eager, entry_of(eager))):
                if padded:
                    torchsbp.set_sizes(
                        m, [(height - 4 * i, width), (height, width), (height, width - 9)], (height, width)
                    )
                forward(x)
            assert_same(model, eager)
    assert counts == [1]


@pytest.mark.parametrize("options", [{}, {"per_sample": True}, {"per_sample": False, "sampler": "grid"}], ids=str)
@pytest.mark.parametrize("name", ["vit", "swin"])
def test_one_operator_for_all_batches(name, options):
    model = patched(name, **options)
    eager = copy.deepcopy(model)
    run, counts = compiled(model, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for batch in (4, 6, 2):
            x = MODELS[name].images(batch)
            run(x), entry_of(eager)(x)
            assert_same(model, eager)
    assert counts == [1]


def test_models_of_other_seeds_and_copies_draw_for_themselves():
    model, other = patched("vit"), patched("vit", seed=1)
    x = MODELS["vit"].images()
    run, _ = compiled(model)
    for _ in range(2):
        run(x)
    for its, step in ((copy.deepcopy(model), 3), (model, 3), (other, 1)):
        eager = copy.deepcopy(its)
        torch.compile(entry_of(its), fullgraph=True, backend="aot_eager")(x), entry_of(eager)(x)
        assert_same(its, eager)
        assert entry_of(its).sbp_step == step
    torchsbp.set_step(model, 0)
    run(x)
    a, b = (entry_of(m).sbp.masks.drawn.sites[0].rows for m in (model, other))
    assert a.tolist() != b.tolist()


def test_another_seed_or_ratio_is_noticed():
    model = patched("vit")
    eager, x = copy.deepcopy(model), MODELS["vit"].images()
    run, counts = compiled(model)
    for seed, ratio in ((0, 0.5), (7, 0.5), (7, 0.4), (7, 0.75)):
        for m in (model, eager):
            masks = entry_of(m).sbp.masks
            masks.seed, masks.ratios = seed, (ratio,) * len(masks.ratios)
        run(x), entry_of(eager)(x)
        assert_same(model, eager)
    assert counts == [1] * 4


def shuffled(shape, ratios, key):
    return SAMPLERS["random"](shape, ratios, key + 1)


@pytest.mark.parametrize("options, whole", [({"sampler": shuffled}, False), ({}, True)])
def test_others_samplers_and_what_is_captured_whole_are_read_by_the_compiler(options, whole):
    model = patched("swin", **options)
    eager, x = copy.deepcopy(model), MODELS["swin"].images()
    run, counts = compiled(model)
    with torch._inductor.config.patch({"triton.cudagraphs": whole}):
        for _ in range(2):
            run(x), entry_of(eager)(x)
            assert_same(model, eager)
    assert counts == [0]


def name_of(model: nn.Module, x: Tensor) -> str:
    found = []

    def backend(graph, inputs):
        found.extend(node.args[0] for node in graph.graph.nodes if node.args and isinstance(node.args[0], str))
        return graph.forward

    torch._dynamo.reset()
    torch.compile(entry_of(model), fullgraph=True, backend=backend)(x)
    return found[0]


@pytest.mark.parametrize("name", ["vit", "swin, padded"])
def test_results_are_memory_of_their_own(name):
    """They are those that the compiler was told of, and what is drawn next leaves them as they are."""
    which, step = name_of(patched(name), MODELS[name].images()), torch.tensor(3)
    torch.library.opcheck(draw.default, (which, step, None, 2), test_utils=("test_schema", "test_faketensor"))
    results = [tensor for batch in (2, 2, 5) for tensor in draw(which, step, None, batch)]
    assert len({tensor.untyped_storage()._cdata for tensor in results}) == len(results)
    assert all(tensor.is_contiguous() for tensor in results)


def test_what_follows_from_windows_is_there_once():
    """Of 4 blocks rows and slots differ; the rest is that of 2 kinds of windows in each of 2 stages."""
    which = name_of(patched("swin"), MODELS["swin"].images())
    sites = operators.plan_of(which)[0].sites
    kinds = {site.partition for site in sites}
    shifted = sum(any(kind.shift) for kind in kinds)
    found = operators.layout(which, torch.device("cpu"))
    assert len(found.kinds) == 2 * len(sites) + 3 * len(kinds) + shifted
    on_a_gpu = operators.layout(which, torch.device("cuda", 0))
    assert len(on_a_gpu.kinds) == len(found.kinds) + len(sites)  # the inverse of rows


def test_graphs_of_models_that_are_gone_are_let_go():
    captures, (gone, here) = operators.Captures(), (torch.zeros((), dtype=torch.int64) for _ in range(2))
    for step in (gone, here):
        captures.graphs[StorageWeakRef(step.untyped_storage()), 0, step.device, 0, None] = None
    del gone, step
    gc.collect()
    captures.let_go()
    assert [key[0] for key in captures.graphs] == [StorageWeakRef(here.untyped_storage())]


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler's, where it goes on in parts
def test_what_can_not_be_drawn_is_refused_in_a_compiled_step_too():
    model = torchsbp.apply(MODELS["convnext"].model(), keep_ratio=0.5, sampler="frames")
    torch._dynamo.reset()
    with pytest.raises(UsageError, match="samplers of frames need a video grid"):
        torch.compile(model, backend="aot_eager")(MODELS["convnext"].images())
    torch._dynamo.reset()
