"""Strong scaling: the same rows and experts over more GPUs.

    python3 benches/scaling.py FOLDER/*.jsonl

reads what `times` and `pytorch.py` have written at EP = 1 and some ETP. A column says the microseconds
of a call, forward plus backward, and how many times as fast as on the fewest GPUs that is.
"""

import json
import sys


def main():
    times = {}
    for path in sys.argv[1:]:
        for row in map(json.loads, open(path)):
            if "both_us" in row:
                side = row.get("backend") or f"PyTorch, {row['run']}, {row['base']}"
                times.setdefault((row["case"], side), {})[row["gpus"]] = row["both_us"]
    gpus = sorted({count for of_side in times.values() for count in of_side})
    if not gpus:
        sys.exit("no times in " + ", ".join(sys.argv[1:]))
    print(f"{'case':<13}{'side':<28}" + "".join(f"{f'{count} GPUs':>20}" for count in gpus))
    for (case, side), of_side in sorted(times.items()):
        first = of_side[min(of_side)]
        cell = lambda us: f"{us:.1f} ({first / us:.2f})"
        cells = [cell(of_side[count]) if count in of_side else "" for count in gpus]
        print(f"{case:<13}{side:<28}" + "".join(f"{text:>20}" for text in cells))


if __name__ == "__main__":
    main()
