"""Time of the plan of redundant experts on one CPU core, and how many experts it moves.

    python benchmarks/redundancy_plan.py [--repeats 30]

Rows of every source rank for every expert are drawn from a Zipf law of the given exponent, 131,072 rows per rank
(16,384 tokens, 8 experts each). A layer's GPU waits for this once per micro-batch.

On 2 cores of a shared x86 host, torch 2.13, numpy 2.4, default arguments (min / median / max ms at max_imbalance 1.0,
exponent 0.6): E = 256 on 64 ranks 0.84 / 1.04 / 1.4, on 8 ranks 0.26 / 0.27 / 0.3; E = 128 on 64 ranks 0.42 / 0.44 /
2.2. At max_imbalance 1.05 even routing (exponent 0) moves nothing, where exact balance moves about an expert per rank.
"""

import argparse
import time
from statistics import median

import numpy as np

from lightning_moe_strategy.expert_parallel.redundancy import plan_redundancy

SIZES = ((8, 2), (128, 8), (128, 64), (256, 8), (256, 64))
"""Experts and ranks."""
EXPONENTS = (0.0, 0.6, 1.2)
IMBALANCES = (1.0, 1.05)
ROWS_PER_RANK = 16_384 * 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=30)
    arguments = parser.parse_args()
    generator = np.random.default_rng(0)
    print("experts ranks zipf  skew allowed |  min ms  median  max | moved experts  moved rows  after")
    for num_experts, num_ranks in SIZES:
        for exponent in EXPONENTS:
            shares = generator.permutation(1 / np.arange(1, num_experts + 1) ** exponent)
            counts_RE = np.stack(
                [generator.multinomial(ROWS_PER_RANK, shares / shares.sum()) for _ in range(num_ranks)]
            )
            for max_imbalance in IMBALANCES:
                seconds = []
                for _ in range(arguments.repeats):
                    start = time.perf_counter()
                    plan = plan_redundancy(counts_RE, num_ranks, max_imbalance=max_imbalance)
                    seconds.append(time.perf_counter() - start)
                before, after = (max(rows) / ROWS_PER_RANK for rows in (plan.rows_before, plan.rows_after))
                print(
                    f"{num_experts:7} {num_ranks:5} {exponent:4} {before:5.2f} {max_imbalance:7} | "
                    f"{1e3 * min(seconds):7.2f} {1e3 * median(seconds):7.2f} {1e3 * max(seconds):4.1f} | "
                    f"{plan.num_moved_experts:13} {plan.num_moved_rows / counts_RE.sum():11.1%} {after:6.3f}"
                )


if __name__ == "__main__":
    main()
