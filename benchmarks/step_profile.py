"""Profiles a rank's training step: CPU time of each thread, memory, buckets, and a picture of one step.

    python benchmarks/step_profile.py bytegrad --ranks 2 --rate 1gbit --picture step.png     # root, Linux

The contestants are those of network.py; only contestants with a Recorder produce a picture. If they wait for gradients,
a table lists the delay of each bucket's mean relative to the schedule floor.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from bucket_times import BucketTimes, table_of_buckets
from contestants import CONTESTANTS
from environment import write_record
from network import RANK_ENVIRONMENT, add_compute_arguments, burst_of, check_compute_arguments
from processes import Limits, RankFailure, Stopped, run_ranks
from report import bits_per_second
from step_profile_rank import Settings
from table import table
from torchbagua.cli.namespaces import EmulatedNetwork


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("contestants", nargs="+", choices=list(CONTESTANTS), metavar="CONTESTANT")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rate", default="1gbit", help="rate of each rank, or 'unshaped'")
    parser.add_argument("--params", type=float, default=12.5, help="millions of parameters (default 12.5)")
    add_compute_arguments(parser)
    parser.add_argument("--bucket-cap-mb", type=float, default=8.0)
    parser.add_argument("--steps", type=int, default=30, help="measured steps (default 30)")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw rank 0's last step; needs one contestant")
    parser.add_argument("--json", type=Path, metavar="PATH")
    arguments = parser.parse_args()
    check_compute_arguments(parser, arguments, arguments.contestants)
    if arguments.picture is not None and len(arguments.contestants) > 1:
        parser.error(f"--picture needs one contestant, got {len(arguments.contestants)}")
    limits = Limits(600.0)
    profiles = {}
    for contestant in arguments.contestants:
        rate = None if arguments.rate == "unshaped" else arguments.rate
        network = EmulatedNetwork([0] * arguments.ranks, rank_rate=rate, burst=burst_of(arguments))
        prefixes = [["ip", "netns", "exec", network.namespace(rank)] for rank in range(arguments.ranks)]
        try:
            with tempfile.TemporaryDirectory(prefix="torchbagua-step-profile-") as folder, network:
                settings = Settings(
                    scratch=folder,
                    init_method=f"tcp://{network.address(0)}:29500",
                    num_ranks=arguments.ranks,
                    contestant=contestant,
                    num_parameters=round(arguments.params * 1e6),
                    is_idle=arguments.compute == "idle",
                    compute_ms=arguments.compute_ms,
                    bits_per_second=None if rate is None else bits_per_second(rate),
                    bucket_cap_mb=arguments.bucket_cap_mb,
                    num_steps=arguments.steps,
                    picture=None if arguments.picture is None else str(arguments.picture.resolve()),
                )
                environment = RANK_ENVIRONMENT | {"GLOO_SOCKET_IFNAME": "eth0"}
                options = {"prefixes": prefixes, "environment": environment}
                run_ranks("step_profile_rank.py", settings, Path(folder), limits, contestant, **options)
                profiles[contestant] = json.loads(Path(folder, "profile.json").read_text())
        except (RankFailure, Stopped) as error:
            print(f"stopped by {error}", file=sys.stderr)
            return 1
    threads = list(dict.fromkeys(thread for profile in profiles.values() for thread in profile["processor_ms"]))
    rows = [
        [
            CONTESTANTS[name].label,
            f"{profile['step_ms']:.0f}",
            *(f"{profile['processor_ms'].get(thread, 0.0):.1f}" for thread in threads),
            f"{profile['peak_mib']:.0f}",
        ]
        for name, profile in profiles.items()
    ]
    print(table(["rank 0", "ms/step", *(f"{thread}, CPU ms" for thread in threads), "peak MiB"], rows))
    for name, profile in profiles.items():
        if "buckets" in profile:
            buckets = [BucketTimes(**bucket) for bucket in profile["buckets"]]
            print(f"\n{CONTESTANTS[name].label}, medians of {arguments.steps} steps\n\n{table_of_buckets(buckets)}")
    about = {"ranks": arguments.ranks, "rate": arguments.rate, "num_parameters": round(arguments.params * 1e6)}
    about |= {"is_idle": arguments.compute == "idle"}
    write_record(arguments.json, {**about, "profiles": profiles})
    return 0


if __name__ == "__main__":
    sys.exit(main())
