"""Runs the command, or says in one line why it cannot begin."""

import sys


def main(arguments: list[str]) -> int:
    """Runs from the command line; see :mod:`flashmoe_megatron.bench.command`."""
    try:
        import torch  # noqa: F401
    except (ImportError, OSError) as error:
        sys.stderr.write(
            f"flashmoe_megatron.bench: torch cannot be imported ({error}): "
            'wanted what `pip install "torch>=2.11"` brings\n'
        )
        return 2
    from flashmoe_megatron.bench import command

    return command.main(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
