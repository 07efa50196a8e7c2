"""The truth check of a step, with the weights it needs: every version that sampled anything in it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from broker.errors import PolicyMismatch
from broker.messages import AdapterRef
from broker.runspec import AlgorithmSection
from broker.store import Store
from learner.buffer import Held
from learner.truth import TruthReport, choose, compare, tolerance_of, verdict

if TYPE_CHECKING:
    from learner.model import Policy


class Verifier:
    """Keeps the weights of the versions that may still be trained on, and checks batches against them."""

    def __init__(self, store: Store, algorithm: AlgorithmSection) -> None:
        self._store = store
        self._algorithm = algorithm
        self._weights: dict[int, bytes] = {}

    def remember(self, version: int, weights: bytes, keep: Collection[int]) -> None:
        """Keep a version's weights; those not in `keep` may go."""
        self._weights[version] = weights
        for old in [number for number in self._weights if number not in keep]:
            del self._weights[old]

    def weights_of(self, version: int) -> bytes | None:
        """A version's weights, if they are kept here."""
        return self._weights.get(version)

    async def weights_for(self, batch: Sequence[Held], published: Mapping[int, AdapterRef]) -> dict[int, bytes | None]:
        """The adapter of every version that sampled anything in `batch`, None for the base model.

        Raises PolicyMismatch for a version that the run never published, or has retired.
        """
        versions = {
            version
            for held in batch
            for episode in held.group.episodes
            for row in episode.rows
            for version in set(row.served_by[row.trained].tolist())
        }
        for version in versions - {0} - set(self._weights):
            ref = published.get(version)
            if ref is None:
                raise PolicyMismatch(
                    f"tokens were sampled under version {version}, which this run never published or has retired"
                )
            self._weights[version] = await self._store.get_patiently(ref.blob)
        return {version: self._weights.get(version) for version in versions}

    def check(
        self, policy: Policy, batch: Sequence[Held], weights: Mapping[int, bytes | None], step: str
    ) -> TruthReport:
        """Score a sample of the batch under its recorded versions. Raises PolicyMismatch that names `step`.

        Blocking: runs where the policy computes, before any gradient is applied.
        """
        episodes = [episode for held in batch for episode in held.group.episodes]
        spans = choose(episodes, self._algorithm.truth_samples)
        recorded, recomputed, pairs = [], [], []
        for version in sorted({span.version for span in spans}):
            ours = [span for span in spans if span.version == version]
            rows = [episodes[span.episode].rows[span.row] for span in ours]
            for span, row, score in zip(ours, rows, policy.score(rows, weights[version]), strict=True):
                recorded.append(row.behaviour[row.trained][span.tokens])
                recomputed.append(score[span.tokens])
                pairs.append((version, span.replica))
        report = compare(recorded, recomputed, pairs)
        problem = verdict(report, tolerance_of(self._algorithm, policy.dtype_name), policy.dtype_name)
        if problem is not None:
            raise PolicyMismatch(f"{step}: {problem}")
        return report
