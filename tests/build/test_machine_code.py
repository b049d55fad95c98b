"""In every kernel that is shipped main loops are uniform and fence what threads have copied, no
acquire has lost its load, and no arrival overtakes one."""

import pytest

import machine_code
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
    assert machine_code.moves_in_loops(machine_code.instructions(LISTING)) == {"_Z5firstv": [2, 0]}


def test_counts_acquires_without_their_load() -> None:
    listing = """
        Function : _Z5firstv
        /*0010*/                   LDG.E.STRONG.SYS R2, desc[UR4][R2.64] ;
        /*0020*/                   CCTL.IVALL ;                              /* 0x0 */
        /*0030*/              @!P0 NOP ;
        /*0040*/              @!P0 CCTL.IVALL ;
        /*0050*/              @!P1 NOP ;
        /*0060*/                   CCTL.IVALL ;
        Function : _Z6secondv
        /*0010*/                   NOP ;
        /*0020*/                   CCTL.IVALL ;
    """
    found = machine_code.lost_acquires(machine_code.instructions(listing))
    assert found == {"_Z5firstv": 1, "_Z6secondv": 1}


def test_counts_arrivals_that_do_not_depend_on_the_load_before_them() -> None:
    listing = """
        Function : _Z5firstv
        /*0010*/              @!P0 LDS.128 R24, [R17+0x180] ;
        /*0020*/              @!P0 SYNCS.ARRIVE.TRANS64.RED.A1T0 RZ, [R16+URZ], RZ ;
        Function : _Z6secondv
        /*0010*/                   SYNCS.ARRIVE.TRANS64.RED.A1T0 RZ, [R2+URZ], RZ ;
        /*0020*/                   LDS.64 R8, [R10+0x180] ;
        /*0030*/                   LOP3.LUT R4, R9, R3, RZ, 0xfc, !PT ;
        /*0040*/                   ISETP.GT.AND P1, PT, R4, -0x1, PT ;
        /*0050*/               @P1 SYNCS.ARRIVE.TRANS64.RED.A1T0 RZ, [R2+URZ], RZ ;
        Function : _Z5thirdv
        /*0010*/                   LDS R8, [R10] ;
        /*0020*/                   ISETP.GT.AND P1, PT, R9, -0x1, PT ;
        /*0030*/               @P1 SYNCS.ARRIVE.TRANS64.RED.A1T0 RZ, [R2+URZ], RZ ;
        Function : _Z6fourthv
        /*0010*/                   LDS R8, [R10] ;
        /*0020*/                   IADD3 R8, R9, 0x1e0, RZ ;
        /*0030*/                   SYNCS.ARRIVE.TRANS64.RED.A1T0 RZ, [R8+URZ], RZ ;
    """
    found = machine_code.early_arrivals(machine_code.instructions(listing))
    assert found == {"_Z5firstv": 1, "_Z6secondv": 0, "_Z5thirdv": 1, "_Z6fourthv": 1}


def test_tells_which_stages_have_a_fence_before_their_products() -> None:
    products = (
        "        /*0090*/                   HGMMA.64x256x16.F32.BF16 R24, gdesc[UR16], R24 ;\n"
    )
    wait = "        /*0010*/                   SYNCS.PHASECHK.TRANS64 P0, [R2+URZ], R3 ;\n"
    fence = "        /*0020*/                   FENCE.VIEW.ASYNC.S ;\n"
    apart = "        /*0100*/                   MOV R4, R4 ;\n" * 120
    listing = "".join(
        [
            "        Function : _Z5firstv\n",
            *(wait, fence, products, products, apart),
            *(wait, products, products),
            "        Function : _Z6secondv\n",
            *(fence, wait, products, apart),  # before the wait it orders nothing
            *(wait, fence, products),
        ]
    )
    found = machine_code.fenced_loops(machine_code.instructions(listing))
    assert found == {"_Z5firstv": [True, False], "_Z6secondv": [False, True]}


def test_counts_products_of_fp8() -> None:
    listing = LISTING.replace("HGMMA.64x256x16.F32.BF16", "QGMMA.64x128x32.F32.E4M3.E4M3")
    assert machine_code.moves_in_loops(machine_code.instructions(listing)) == {"_Z5firstv": [2, 0]}


@pytest.mark.timeout(900)
def test_main_loops_in_fp8_are_promoted_and_touch_no_local_memory(
    kernels: machine_code.Kernels,
) -> None:
    for code in (code for name, code in kernels.items() if machine_code.IN_FP8 in name):
        at = [i for i, one in enumerate(code) if one.operation.startswith("QGMMA")]
        if not at:
            continue
        assert len(at) == 8  # two halves of a stage's columns, 32 of K each
        # From the wait for a stage to the branch after both promotions.
        begin = max(i for i in range(at[0]) if code[i].operation.startswith(machine_code.WAIT))
        end = min(i for i in range(at[-1], len(code)) if code[i].operation.startswith("BRA"))
        loop = [one.operation for one in code[begin:end]]
        assert sum(operation.startswith("FFMA") for operation in loop) == 2 * 64
        assert not [one for one in loop if one.startswith(("LDL", "STL"))]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> machine_code.Kernels:
    """The kernels of the library that is shipped."""
    library = tmp_path_factory.mktemp("library") / "libflashmoe.so"
    return machine_code.instructions(machine_code.disassemble(nvcc_build.build_library(library)))


@pytest.mark.timeout(900)  # compiles csrc/ where its objects are not in the cache
def test_no_acquire_has_lost_its_load(kernels: machine_code.Kernels) -> None:
    found = machine_code.lost_acquires(kernels)
    assert len(found) > 24  # layers, plans, dispatch alone, gradients of biases
    assert not any(found.values())


@pytest.mark.timeout(900)
def test_no_arrival_overtakes_a_load(kernels: machine_code.Kernels) -> None:
    layers = {name: code for name, code in kernels.items() if "layer_kernel" in name}
    # Without slots, with them, a forward with narrow tiles, and in FP8 two of each pass and the
    # backwards in 16 bits.
    assert len(layers) == 2 * 16 + 1 + 6
    for code in layers.values():
        assert sum(one.operation == machine_code.ARRIVAL for one in code) >= 5
    assert not any(machine_code.early_arrivals(layers).values())


@pytest.mark.timeout(900)
def test_main_loops_fence_what_threads_have_copied(kernels: machine_code.Kernels) -> None:
    found = machine_code.fenced_loops(kernels)
    in_fp8 = [loops for name, loops in found.items() if machine_code.IN_FP8 in name]
    assert in_fp8 == [[False]] * 4  # TMA's rows alone
    found = {name: loops for name, loops in found.items() if machine_code.IN_FP8 not in name}
    forwards = [sorted(loops) for name, loops in found.items() if "ForwardPass" in name]
    # TMA's rows, and those that are read in place.
    assert forwards == [[False, True]] * (2 * 8 + 1)
    backwards = {name: sorted(loops) for name, loops in found.items() if "BackwardPass" in name}
    # The same, and the weights' gradients, with tokens read in place, or with dY unless transposed;
    # also in the backwards of forwards in FP8. With spare slots weights' gradients have TMA's rows
    # alone.
    with_slots = [loops for name, loops in backwards.items() if "with_slots" in name]
    assert with_slots == [[False, False, True]] * 8
    assert [*backwards.values()].count([False, False, True, True]) == len(backwards) - 8 == 8 + 2


@pytest.mark.timeout(900)
def test_no_main_loop_moves_descriptors(kernels: machine_code.Kernels) -> None:
    if resource_table.release() not in resource_table.TABLE.read_text():
        pytest.skip(f"measured with another compiler than {resource_table.release()}")
    found = machine_code.moves_in_loops(kernels)
    in_fp8, others = {}, {}
    for name, counts in found.items():
        (in_fp8 if machine_code.IN_FP8 in name else others)[name] = counts

    def of(kernels: dict[str, list[int]], part: str) -> list[list[int]]:
        return [counts for name, counts in kernels.items() if part in name]

    assert of(in_fp8, "ForwardPass") == of(in_fp8, "BackwardPass") == [[0]] * 2
    # Without slots, with them, and with narrow tiles.
    assert of(others, "ForwardPass") == [[0]] * (2 * 8 + 1)
    # The layer's two products, and the weights' gradients; also of forwards in FP8.
    assert of(others, "BackwardPass") == [[0, 0]] * (2 * 8 + 2)
    assert of(others, "weight_grads_kernel") == [[0, 0]]  # behind a backward in FP8
