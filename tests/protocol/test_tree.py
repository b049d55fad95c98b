"""The tree of sums, compiled for the host: one value whatever the number of ranks that share it."""

import random
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from tests.protocol.programs import CSRC, compiler

PROGRAM = r"""
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include "flashmoe/protocol/tree.h"

using namespace flashmoe::protocol;

float widened(uint16_t bits) {
    const uint32_t word = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &word, sizeof value);
    return value;
}

uint16_t rounded(float value) {  // to bfloat16, to the nearest, ties to even; no NaN
    uint32_t word;
    std::memcpy(&word, &value, sizeof word);
    return uint16_t((word + 0x7FFF + (word >> 16 & 1)) >> 16);
}

uint16_t add(uint16_t left, uint16_t right) { return rounded(widened(left) + widened(right)); }

// Reads, for each token, how many rows each leaf has and these rows; writes the token's sum on 1,
// 2, 4 and 8 ranks.
int main() {
    std::vector<uint16_t> rows[kTreeLeaves];
    for (;;) {
        for (auto& of_leaf : rows) {
            unsigned count, bits;
            if (std::scanf("%u", &count) != 1) return 0;
            of_leaf.clear();
            for (unsigned i = 0; i < count && std::scanf("%x", &bits) == 1; ++i) {
                of_leaf.push_back(uint16_t(bits));
            }
        }
        for (int ranks = 1; ranks <= kTreeLeaves; ranks *= 2) {
            const int of_rank = leaves_of_rank(ranks);
            const auto share = [&](int rank) {
                const auto leaf = [&](int i) {
                    float sum = kNoSum;
                    for (uint16_t row : rows[rank * of_rank + i]) sum += widened(row);
                    return rounded(sum);
                };
                return sum_tree<uint16_t>(of_rank, leaf, add);
            };
            // A rank without rows of the token sends nothing.
            const auto sent = [&](int rank) {
                bool has_rows = false;
                for (int i = 0; i < of_rank; ++i) has_rows |= !rows[rank * of_rank + i].empty();
                return has_rows ? share(rank) : rounded(kNoSum);
            };
            std::printf("%x ", unsigned(sum_tree<uint16_t>(ranks, sent, add)));
        }
        std::printf("\n");
    }
}
"""
HEADER = Path("flashmoe") / "protocol" / "tree.h"
Rows = list[list[float]]
"""The values of a token's rows, by eighth of the experts."""


def built(folder: Path, old: str = "", new: str = "") -> Path:
    """Compiles the program, over the tree as it is or with a text of it replaced."""
    shutil.copytree(CSRC / HEADER.parent, folder / HEADER.parent)
    text = (folder / HEADER).read_text()
    assert not old or text.count(old) == 1
    (folder / HEADER).write_text(text.replace(old, new) if old else text)
    (folder / "tree.cc").write_text(PROGRAM)
    flags = ["-std=c++17", "-O1", "-Wall", "-fsanitize=undefined", "-fno-sanitize-recover"]
    subprocess.run(
        [compiler(), *flags, f"-I{folder}", str(folder / "tree.cc"), "-o", str(folder / "tree")],
        check=True,
        timeout=300,
    )
    return folder / "tree"


def bits(value: torch.Tensor) -> int:
    return int(value.to(torch.bfloat16).view(torch.int16)) & 0xFFFF


def tokens(number: int) -> list[Rows]:
    """Tokens of up to 16 rows, in many eighths or few; zeros of both signs are frequent."""
    draw = random.Random(5)
    found = []
    for _ in range(number):
        rows: Rows = [[] for _ in range(8)]
        places = draw.sample(range(8), draw.randint(1, 8))
        for _ in range(draw.randint(1, 16)):
            value = draw.choice([0.0, -0.0]) if draw.random() < 0.3 else draw.gauss(0, 1)
            rounded = torch.tensor(value).to(torch.bfloat16)
            rows[draw.choice(places)].append(float(rounded))
        found.append(rows)
    return found


def line(rows: Rows) -> str:
    words = []
    for of_leaf in rows:
        words += [f"{len(of_leaf)}", *(f"{bits(torch.tensor(row)):x}" for row in of_leaf)]
    return " ".join(words)


def sums(program: Path, of_tokens: list[Rows]) -> list[list[int]]:
    """What the program finds for each token on 1, 2, 4 and 8 ranks."""
    done = subprocess.run(
        [str(program)],
        input="\n".join(map(line, of_tokens)),
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    return [[int(word, 16) for word in each.split()] for each in done.stdout.splitlines()]


def node(rows: Rows) -> torch.Tensor | None:
    """The sum of some eighths, or nothing where none has a row: the tree as it is said in words."""
    if len(rows) == 1:
        if not rows[0]:
            return None
        total = torch.tensor(rows[0][0])
        for row in rows[0][1:]:
            total = total + torch.tensor(row)
        return total.to(torch.bfloat16)
    half = len(rows) // 2
    left, right = node(rows[:half]), node(rows[half:])
    if left is None or right is None:
        return right if left is None else left
    return (left.float() + right.float()).to(torch.bfloat16)


@pytest.fixture(scope="module")
def of_tokens() -> list[Rows]:
    return tokens(4000)


def test_the_sum_is_the_trees_on_any_number_of_ranks(tmp_path: Path, of_tokens: list[Rows]) -> None:
    wanted = [node(rows) for rows in of_tokens]
    negative_zeros = 0
    for rows, want, got in zip(of_tokens, wanted, sums(built(tmp_path), of_tokens), strict=True):
        assert want is not None
        assert got == [bits(want)] * 4, rows
        negative_zeros += bits(want) == 0x8000
    assert negative_zeros > 20


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("kNoSum = -0.0f", "kNoSum = 0.0f"),
        ("left & 1; left >>= 1", "left; left = 0"),
        ("waiting[1] = waiting[2];", ""),
    ],
    ids=["zeros lose their sign", "one after the other", "a node is added twice"],
)
def test_another_tree_is_noticed(tmp_path: Path, of_tokens: list[Rows], old: str, new: str) -> None:
    wanted = [bits(found) for found in map(node, of_tokens) if found is not None]
    got = sums(built(tmp_path, old, new), of_tokens)
    assert got != [[want] * 4 for want in wanted]
