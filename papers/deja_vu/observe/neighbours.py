"""Nearest neighbours as predictors (App. C.2 of the paper): which rows of fc1 have the largest products with the input.

``exact`` computes them all, which reads fc1 whole. ``hnsw`` searches a graph over the rows. Both know the weights, and
neither learns anything. The bias is one more entry of a row, and the input gets a 1 for it.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import OPTForCausalLM

from dejavu_train.bundle.artifact import Bundle
from dejavu_train.bundle.selector import PredictorSelector, Sites
from dejavu_train.evaluation.perplexity import EvalCorpus, eval_batches, increase, window_nats
from dejavu_train.families import LayerInput, Site, Target
from dejavu_train.models.hooks import decoder_layers, record
from dejavu_train.sparse.masked import Select, masking

M, EF_CONSTRUCTION = 16, 200  # of the graph; the defaults of its documentation
TIMED_TOKENS = 48


@dataclasses.dataclass(frozen=True)
class NeighbourRow:
    """One way to select neurons, all heads dense.

    ``ef``: candidates that the search of the graph keeps, None for other methods. ``density``: selected / all.
    ``recall_active``: selected and active / active, on the sparse model's own inputs. ``increase``: of perplexity over
    the dense model's, a fraction. ``ms_per_token``: selecting for one token in all layers, on one thread where it is a
    CPU. Median. ``build_seconds``: of the graphs.
    """

    method: str
    ef: int | None
    density: float
    recall_active: float
    perplexity: float
    increase: float
    increase_error: float | None
    ms_per_token: float
    build_seconds: float | None
    tokens: int


class Exact:
    """The ``share`` of the neurons with the largest pre-activations."""

    sites: frozenset[Site]

    def __init__(self, model: OPTForCausalLM, share: float) -> None:
        self.blocks = decoder_layers(model)
        self.sites = frozenset(Site(layer, LayerInput.MLP) for layer in range(len(self.blocks)))
        self.count = max(1, round(share * self.blocks[0].fc1.out_features))

    def nearest(self, layer: int, inputs: Tensor) -> Tensor:
        """(N, d) -> (N, count) neurons."""
        return self.blocks[layer].fc1(inputs).topk(self.count, dim=-1).indices

    def __call__(self, layer: int, target: Target, sites: Sites) -> Tensor | None:
        if target != Target.MLP:
            return None
        inputs = sites[Site(layer, LayerInput.MLP)]
        nearest = self.nearest(layer, inputs.flatten(0, -2))
        keep = torch.zeros(len(nearest), self.blocks[layer].fc1.out_features, dtype=torch.bool, device=nearest.device)
        return keep.scatter_(-1, nearest, True).view(*inputs.shape[:-1], -1)

    def up(self, layer: int) -> None:
        return None


class Graph(Exact):
    """The same by approximate search: a hierarchical navigable small-world graph of each layer's rows, on the CPU.

    Raises:
        ImportError: hnswlib is not installed.
    """

    def __init__(self, model: OPTForCausalLM, share: float, ef: int) -> None:
        import hnswlib

        super().__init__(model, share)
        start = time.perf_counter()
        self.graphs = []
        for block in self.blocks:
            rows = torch.cat([block.fc1.weight, block.fc1.bias[:, None]], -1).float().cpu().numpy()
            graph = hnswlib.Index(space="ip", dim=rows.shape[1])
            graph.init_index(max_elements=len(rows), M=M, ef_construction=EF_CONSTRUCTION, random_seed=0)
            graph.set_num_threads(1)  # threads make a graph that differs from run to run
            graph.add_items(rows)
            graph.set_ef(max(ef, self.count))
            self.graphs.append(graph)
        self.build_seconds = time.perf_counter() - start

    def nearest(self, layer: int, inputs: Tensor) -> Tensor:
        queries = torch.nn.functional.pad(inputs.float(), (0, 1), value=1.0).cpu().numpy()
        labels, _ = self.graphs[layer].knn_query(queries, k=self.count)
        return torch.from_numpy(labels.astype(np.int64)).to(inputs.device)


@torch.no_grad()
def neighbour_rows(
    model: OPTForCausalLM,
    held: EvalCorpus,
    density: float,
    efs: Sequence[int],
    batch_tokens: int,
    bundle: Bundle | None = None,
    progress: Callable[[int], object] = lambda tokens: None,
) -> tuple[list[NeighbourRow], str | None]:
    """Score and time exact search, graphs of every ``ef``, and the predictors of ``bundle`` at the same density.

    Returns: the rows, and why no graph could be measured, or None.
    """
    selectors: list[tuple[str, int | None, Any]] = [("exact", None, Exact(model, density))]
    missing = None
    try:
        selectors += [("hnsw", ef, Graph(model, density, ef)) for ef in efs]
    except ImportError:
        missing = "hnswlib is not installed (pip install 'dejavu-train[neighbours]')"
    if bundle is not None and Target.MLP in bundle.targets:
        selectors.append(("predictor", None, PredictorSelector(bundle.at(density, 1.0), model.device)))
    inputs = _inputs(model, held, batch_tokens)
    dense = _score(model, held, batch_tokens, None)[0]
    progress(held.tokens)
    rows = []
    for method, ef, selector in selectors:
        nats, selected, recall = _score(model, held, batch_tokens, selector)
        progress(held.tokens)
        change, error = increase(nats, dense, held.document_tokens)
        perplexity = float(np.exp(nats.sum() / held.tokens))
        built = getattr(selector, "build_seconds", None)
        milliseconds = _time(selector, inputs)
        rows.append(
            NeighbourRow(method, ef, selected, recall, perplexity, change, error, milliseconds, built, held.tokens)
        )
    return rows, missing


def _score(
    model: OPTForCausalLM, held: EvalCorpus, batch_tokens: int, selector: Select | None
) -> tuple[np.ndarray, float, float]:
    """Nats per document, share selected, and recall of active neurons. Without a selector of the dense model."""
    nats = np.zeros(len(held.document_tokens))
    counts = np.zeros(4)  # all, selected, active, both

    for batch in eval_batches(held, batch_tokens, model.device):
        if selector is None:
            np.add.at(nats, batch.document, window_nats(model, batch))
            continue

        def observe(layer: int, target: Target, keep: Tensor | None, values: Tensor, real: Tensor = batch.real) -> None:
            if target == Target.MLP and keep is not None:
                kept, active = keep[real], values[real] > 0
                counts[:] += [kept.numel(), int(kept.sum()), int(active.sum()), int((kept & active).sum())]

        with masking(model, selector, observe=observe):
            np.add.at(nats, batch.document, window_nats(model, batch))
    return nats, counts[1] / max(counts[0], 1), counts[3] / max(counts[2], 1)


def _inputs(model: OPTForCausalLM, held: EvalCorpus, batch_tokens: int) -> dict[Site, Tensor]:
    """What the sites (..., d) hold for the first tokens of the first batch, by site."""
    batch = next(eval_batches(held, batch_tokens, model.device))
    with record(model, {"attn_in", "mlp_in"}) as got:
        model.model.decoder(input_ids=batch.ids[:1, :TIMED_TOKENS], use_cache=False)
    return {Site(layer, name): places[name][0] for layer, places in got.items() for name in LayerInput}


def _time(selector: Select, inputs: dict[Site, Tensor]) -> float:
    """Median milliseconds to select the neurons of one token in all layers."""
    n_layers = 1 + max(site.layer for site in inputs)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    taken = []
    try:
        for token in range(len(next(iter(inputs.values())))):
            of_token = {key: values[None, token : token + 1] for key, values in inputs.items()}
            start = time.perf_counter()
            for layer in range(n_layers):
                selector(layer, Target.MLP, of_token)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            taken.append(1e3 * (time.perf_counter() - start))
    finally:
        torch.set_num_threads(threads)
    return float(np.median(taken[len(taken) // 8 :]))
