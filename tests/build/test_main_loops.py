"""Main loops are uniform by construction, in every kernel that is shipped."""

from pathlib import Path

import pytest

import main_loops
import nvcc_build
import resource_table

LISTING = """
        Function : _Z5firstv
        /*0010*/                   R2UR UR4, R2 ;                            /* 0x0 */
        /*0020*/                   HGMMA.64x256x16.F32.BF16 R24, gdesc[UR16], R24, UP0 ;
        /*0030*/              @!P0 MOV R4, R4 ;
        /*0040*/                   R2UR UR16, R20 ;
        /*0050*/               @P1 R2UR UR17, R21 ;
        /*0060*/                   HGMMA.64x256x16.F32.BF16 R24, gdesc[UR16], R24, gsb0 ;
{apart}
        /*0910*/                   HGMMA.64x256x16.F32.BF16 R24, gdesc[UR16].tnspB, R24, UP0 ;
        /*0920*/                   HGMMA.64x256x16.F32.BF16 R24, gdesc[UR16].tnspB, R24, gsb0 ;
        Function : _Z6secondv
        /*0010*/                   R2UR UR4, R2 ;
        /*0020*/                   EXIT ;
""".replace("{apart}", "        /*0100*/                   R2UR UR18, R21 ;\n" * 120)


def test_counts_moves_between_the_products_of_a_stage() -> None:
    assert main_loops.moves_in_loops(LISTING) == {"_Z5firstv": [2, 0]}


@pytest.mark.timeout(900)  # compiles csrc/ where its objects are not in the cache
def test_no_main_loop_moves_descriptors(tmp_path: Path) -> None:
    if resource_table.release() not in resource_table.TABLE.read_text():
        pytest.skip(f"measured with another compiler than {resource_table.release()}")
    objects = nvcc_build.build_library(tmp_path / "libflashmoe.so")
    found = main_loops.moves_in_loops(main_loops.disassemble(objects))
    forwards = [counts for name, counts in found.items() if "ForwardPass" in name]
    backwards = [counts for name, counts in found.items() if "BackwardPass" in name]
    assert forwards == [[0]] * 8
    assert backwards == [[0, 0]] * 8  # the layer's two products, and the weights' gradients
