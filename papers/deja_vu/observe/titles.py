"""What each observation is called, where the paper has it, and how to read it."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Title:
    """``paper``: figure, table or section of Liu et al., ICML 2023. ``caption``: what is shown."""

    title: str
    paper: str
    caption: str


TITLES = {
    "sparsity": Title(
        "How many heads and neurons a token can do without",
        "Fig. 3",
        "Units are silenced from the smallest contribution on, as long as what they add together stays below the stated"
        " share of the norm of what all add. Means over tokens; the middle 80 % of the tokens is shaded.",
    ),
    "cosine": Title(
        "How slowly the residual stream turns",
        "Fig. 5a, b; App. B",
        "Cosine similarity of a token's residual stream before layer l and before layer l + n; the last one is the"
        " output of the last layer.",
    ),
    "norms": Title(
        "What a block reads and what it adds",
        "Fig. 5c, d; App. B",
        "X is the residual stream before attention or MLP, F(X) what the block adds to it, with LayerNorm and biases.",
    ),
    "heads": Title(
        "Uniform heads and the norm of their output",
        "Fig. 4",
        "Every head's mean uniformity and mean output norm, and the rank correlation of the two: negative where uniform"
        " heads contribute less, as the paper has it.",
    ),
    "uniformity": Title(
        "Rank correlation of uniformity and output norm",
        "Fig. 4",
        "Per layer: within a token, and of the heads' means.",
    ),
    "union": Title(
        "Sparsity of a whole batch, and what grouping gains",
        "Fig. 8; App. C.1",
        "Share of the units that no row of a batch needs (active neurons; heads at the first of the losses), mean over"
        " the layers. Requests are grouped by their prompts (the first half of a window) and measured on its second"
        " half. In the table layer by layer; gain: how much smaller the union is than that of different documents.",
    ),
    "selections": Title(
        "Contextual, static and non-contextual sparsity",
        "Fig. 1; section 5.2",
        "All take the same number of neurons per token. Oracle: the largest contributions of this token in the dense"
        " pass; static: the most often active on calibration text; non-contextual: the token's embedding through each"
        " block alone.",
    ),
    "predictors": Title(
        "Accuracy, recall and precision of the predictors",
        "section 5.2",
        "On validation documents, in the dense model, as calibrated, first stage alone;"
        " dense layers have no row. The dotted line is the accuracy"
        " of a predictor that selects nothing: with few positives accuracy says little.",
    ),
    "neighbours": Title(
        "Nearest neighbours as predictors",
        "App. C.2",
        "Exact search computes all pre-activations; the graph (HNSW) finds most of the largest ones. Time to select for"
        " one token on this machine, one thread on a CPU, without computing the MLP.",
    ),
    "peaks": Title("Peak rates of the device", "Tables 1 to 3", "Measured in the same run, unless given."),
    "cost": Title(
        "Prompting against generating, attention against MLP",
        "Tables 1 to 3",
        "Theory: operations over the peak rate, bytes over the bandwidth, the longer one counts. Measured:"
        " transformers' dense model, with a synchronisation around each part.",
    ),
}
