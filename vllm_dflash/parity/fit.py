"""Do drawn tokens fit the distributions that they should have? Two tests, and a search for impossible tokens.

Often seen prefixes: chi-square of the tokens that followed, cells with an expectation below 5 pooled into one; the
statistics and degrees of freedom are added up over prefixes.

Rarely seen ones, where no two cells reach 5: a token drawn from p, with tokens in the order of p, is turned into
u = (probability of all before it) + U * p(token), U uniform on [0, 1]. That is exactly uniform on [0, 1] whatever p is
(the randomised probability integral transform), so tokens after different prefixes are tested together, exactly, by
Kolmogorov and Smirnov's test. U comes from a seeded generator.

The smaller of the two p-values counts twice (Bonferroni).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from vllm_dflash.parity.oracle import Floats

#: A correct sampler gives a smaller p-value once in ten thousand runs.
SMALLEST_P = 1e-4

#: Cochran's rule for chi-square.
_SMALLEST_CELL = 5.0


@dataclass
class Fit:
    """Draws after many prefixes, gathered one prefix at a time."""

    seed: int = 0
    chi_square: float = 0.0
    degrees_of_freedom: int = 0
    num_often: int = 0  # draws after prefixes that are often seen
    places: list[float] = field(default_factory=list)  # u of the draws after the others
    num_at_border: int = 0  # draws left out: rounding decides whether these tokens can be drawn
    impossible: list[tuple[int, int]] = field(default_factory=list)  # (prefix number, token)

    def __post_init__(self) -> None:
        self._uniform = np.random.default_rng(self.seed)
        self._num_prefixes = 0

    def add(self, counts: Mapping[int, int], probabilities: Floats, generous: Floats) -> None:
        """Take what followed one prefix.

        Args:
            counts: how often each token followed.
            probabilities: [V] float64, of each token to follow, 0 where a rounding error might cut it off.
            generous: [V] float64, 0 where no rounding error would let it pass.
        """
        self._num_prefixes += 1
        self.impossible += [(self._num_prefixes, token) for token in counts if generous[token] == 0]
        drawn = {token: count for token, count in counts.items() if probabilities[token] > 0}
        total = sum(drawn.values())
        self.num_at_border += sum(count for token, count in counts.items() if generous[token] > 0) - total
        if np.count_nonzero(probabilities) <= 1 or not drawn:
            return  # nothing was left to chance
        observed, expected = _cells(drawn, probabilities, total)
        if len(expected) >= 2:
            self.chi_square += float(((observed - expected) ** 2 / expected).sum())
            self.degrees_of_freedom += len(expected) - 1
            self.num_often += total
        else:
            self._place(drawn, probabilities)

    @property
    def p_often(self) -> float:
        """p-value of the chi-square test; 1 where no prefix was seen often enough."""
        from scipy.stats import chi2

        return float(chi2.sf(self.chi_square, self.degrees_of_freedom)) if self.degrees_of_freedom else 1.0

    @property
    def p_rare(self) -> float:
        """p-value of the test of uniformity; 1 where every prefix was seen often."""
        from scipy.stats import kstest

        return float(kstest(self.places, "uniform").pvalue) if self.places else 1.0

    @property
    def p_value(self) -> float:
        """Of both tests together; 0 where a token was drawn that cannot be."""
        return 0.0 if self.impossible else min(1.0, 2 * min(self.p_often, self.p_rare))

    @property
    def num_tested(self) -> int:
        """Draws that were tested."""
        return self.num_often + len(self.places)

    def _place(self, drawn: Mapping[int, int], probabilities: Floats) -> None:
        order = np.argsort(-probabilities, kind="stable")
        reached = np.empty_like(probabilities)
        reached[order] = np.cumsum(probabilities[order])
        for token, count in sorted(drawn.items()):
            steps = self._uniform.random(count)
            self.places += (reached[token] - steps * probabilities[token]).tolist()


def _cells(drawn: Mapping[int, int], probabilities: Floats, total: int) -> tuple[Floats, Floats]:
    """Observed and expected counts, small cells pooled; one cell where the counts are too few for more."""
    expected = probabilities * total
    own = np.flatnonzero(expected >= _SMALLEST_CELL)
    cells = [(float(drawn.get(int(token), 0)), float(expected[token])) for token in own]
    rest = total - sum(count for count, _ in cells), total - sum(count for _, count in cells)
    if rest[1] >= _SMALLEST_CELL or not cells:
        cells.append(rest)
    elif len(own) < np.count_nonzero(probabilities):
        smallest = min(range(len(cells)), key=lambda i: cells[i][1])
        cells[smallest] = cells[smallest][0] + rest[0], cells[smallest][1] + rest[1]
    observed, wanted = np.array(cells).T
    return observed, wanted
