"""The arguments that the examples share."""

import argparse


def count(text: str) -> int:
    """An argument that has to be a positive number."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {value}, wanted at least 1")
    return value


def add_model_and_data(parser: argparse.ArgumentParser) -> None:
    """Adds what describes the model, its data and its training in every example."""
    add = parser.add_argument
    add("--log-interval", type=count, default=10, help="iterations between two lines of losses")
    add("--num-layers", type=count, default=2)
    add("--hidden-size", type=count, default=128, help="a multiple of 64")
    add("--moe-ffn-hidden-size", type=count, default=256, help="a multiple of 64")
    add("--num-attention-heads", type=count, default=4)
    add("--num-experts", type=count, default=8, help="experts of all ranks together")
    add("--seq-length", type=count, default=256, help="bytes of a sample")
    add("--micro-batch-size", type=count, default=4, help="samples of a rank and micro-batch")
    add("--lr", type=float, default=3e-3)
    add("--seed", type=int, default=1234)
    add("--data-megabytes", type=count, default=8, help="most megabytes of sources that are read")
