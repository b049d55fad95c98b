"""Changes of one line that would be defects, and the test that catches each.

As a program it applies them one after the other to a copy of the working tree, runs the test named
for each and says whether it failed, as it must::

    python -m tests.mutations                # all that this machine can show, half an hour
    python -m tests.mutations heap           # those whose name contains a word
    python -m tests.mutations --list         # the list as a table

A mutation names a function, a piece of its code and what this becomes (see :mod:`tests.patterns`).
The function may move between files and be laid out otherwise; ``unit/test_mutations.py`` holds that
each piece is in the package exactly once and that its test exists.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.patterns import Place, Sources

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "flashmoe_megatron"
NEEDED = (PACKAGE, "tests", "examples", "tools", "pyproject.toml", "README.md")
"""What the tests that catch mutations read."""
TIMEOUT_S = 600


@dataclass(frozen=True)
class Mutation:
    """A change of the package and who catches it.

    Attributes:
        name: What the changed code gets wrong.
        where: The function, class or name that is assigned to: its dotted name or how that ends.
        old: A piece of code that is there exactly once, as :mod:`tests.patterns` compares.
        new: What it becomes.
        caught_by: The test that fails then, as pytest names it.
        on_gpu: A further test that fails on a GPU, or nothing.
    """

    name: str
    where: str
    old: str
    new: str
    caught_by: str
    on_gpu: str = ""


MUTATIONS = (
    Mutation(
        "the kernel does not know that no bit may depend on the number of ranks",
        "KernelBackend._problem_on",
        "rank_invariant=self.options.rank_invariant",
        "rank_invariant=False",
        "tests/unit/test_rank_invariance.py::test_the_kernel_is_told[True]",
        on_gpu="tests/gpu/test_rank_invariance.py::test_any_number_of_ranks_gives_equal_bits",
    ),
    Mutation(
        "experts that eighths cannot be shared out of are left to the library",
        "_check_rank_invariant",
        "EIGHTHS % config.num_ranks or config.num_experts % EIGHTHS",
        "False",
        "tests/unit/test_rank_invariance.py::test_what_the_kernel_cannot_is_refused_by_name",
    ),
    Mutation(
        "a backward fetches the rows that factors of fc1 take, where the forward could keep them",
        "KernelBackend._keeps_rows",
        "if given.gives_rows:",
        "if False:",
        "tests/unit/test_kept_rows.py::test_rows_for_factors_are_kept[narrow-auto]",
        on_gpu="tests/gpu/test_adapted.py::test_sums_and_their_factors_gradients[auto-stack-stack]",
    ),
    Mutation(
        "a layer goes on with the function that its experts had when it was built",
        "RoutedExperts._checked_weights",
        "if functions_of(self._experts) != self._functions:",
        "if False:",
        "tests/megatron/test_layer.py"
        "::test_another_function_after_the_layer_was_built_is_refused[sequential]",
    ),
    Mutation(
        "a stack of one expert takes no gradient of an expert",
        "check_weight_grads",
        "or (1, *buffer.shape) == tensor.shape",
        "",
        "tests/unit/test_frozen.py::test_a_stack_of_one_expert[reference-fc1]",
    ),
    Mutation(
        "a layer that keeps no rows has no tokens in its backward",
        "KernelBackend._keeps_tokens",
        "given.trains_fc1 or self.config.num_ranks > 1",
        "self.config.num_ranks > 1",
        "tests/unit/test_kept_rows.py::test_tokens_are_kept_in_place_of_rows[wide-auto]",
        on_gpu="tests/gpu/test_token_lifetimes.py"
        "::test_micro_batches_whose_owner_lets_go_of_their_tokens",
    ),
    Mutation(
        "wide experts of one GPU keep rows, since their forwards copy them",
        "KernelBackend.__init__",
        "bool(sizes.reads_tokens[True])",
        "all(sizes.reads_tokens)",
        "tests/unit/test_kept_rows.py::test_tokens_are_kept_in_place_of_rows[wide-auto]",
        on_gpu="tests/gpu/test_token_lifetimes.py"
        "::test_micro_batches_whose_owner_lets_go_of_their_tokens",
    ),
    Mutation(
        "tables and the bench say that wide experts of one GPU keep rows",
        "reads_tokens",
        "bool(_sizes_of(config, DEFAULT_CTAS).reads_tokens[True])",
        "all(_sizes_of(config, DEFAULT_CTAS).reads_tokens)",
        "tests/build/test_memory.py::test_one_gpu_keeps_tokens_by_default_at_any_width[gated-1536]",
    ),
    Mutation(
        "hooks see rows of an evaluation that no warp has copied",
        "KernelBackend._make_buffers",
        "training or shows_rows",
        "training",
        "tests/unit/test_capacity_hooks.py::test_the_kernel_shows_its_rows_behind_the_launch",
        on_gpu="tests/gpu/test_own_rows.py::test_hooks_see_all_rows",
    ),
    Mutation(
        "planned memory has rows of narrow experts on one GPU, which fetch none again",
        "plan_memory",
        "0 if sizes.reads_tokens[True] == bindings.READS_TOKENS else rows",
        "rows",
        "tests/build/test_memory.py::test_local_memory_grows_with_the_rows",
    ),
    Mutation(
        "DeepSpeed's reductions are not said to need room where launches leave some",
        "overlap_notice",
        "collectives.is_small(settings.reserved_sms)",
        "True",
        "tests/deepspeed/test_notices.py::test_a_reduction_that_may_not_fit",
    ),
    Mutation(
        "reductions of experts and of all else get all reserved multiprocessors each",
        "most_ctas",
        "2 if reduces_experts(args) else 1",
        "1",
        "tests/megatron/test_communicators.py::test_how_much_fits",
    ),
    Mutation(
        "Megatron's groups of gradients keep NCCL's number of CTAs",
        "_with_limits.get_nccl_options",
        "if own:",
        "if False:",
        "tests/megatron/test_communicators.py::test_communicators_of_megatron_get_it",
    ),
    Mutation(
        "scales of FP8 that an overflow has written stay in the repeat",
        "save_scales",
        "tensor[:rows].copy_(copy[:rows])",
        "pass",
        "tests/unit/test_saved.py::test_scales_after_a_repeat_are_those_of_a_step_that_fits[last]",
    ),
    Mutation(
        "scales of FP8 that an overflow has made begin with what it has written",
        "save_scales",
        "tensor.fill_(_FRESH[place[-1]])",
        "pass",
        "tests/unit/test_saved.py::test_scales_after_a_repeat_are_those_of_a_step_that_fits[first]",
    ),
    Mutation(
        "a module's own generator goes on in a repeat where the overflow has left it",
        "save_module_generators",
        "generator.set_state(state)",
        "pass",
        "tests/unit/test_saved.py::test_generators_of_modules_draw_the_same_again",
    ),
    Mutation(
        "a model without buffers keeps what an iteration has changed in its modules",
        "Changing",
        "self._modules = [module for chunk in model for module in chunk.modules()]",
        "self._modules = [one for chunk in model for one in chunk.modules() if one._buffers]",
        "tests/megatron/test_repeat.py::test_all_that_an_iteration_changes_is_put_back",
    ),
    Mutation(
        "a rank with all experts measures a bound, and waits after every iteration",
        "row_bound_of",
        'return 1.0 if given == "auto" and has_all_experts(config) else given',
        "return given",
        "tests/megatron/test_refusals.py::test_a_graph_of_the_iteration_has_a_bound_of_rows",
    ),
    Mutation(
        "a repeat of an iteration adds to gradients of the one before",
        "Iterations._run.again",
        "model.zero_gradients()",
        "pass",
        "tests/megatron/test_repeat.py::test_every_tensor_is_that_of_a_larger_bound[inputs]",
    ),
    Mutation(
        "what an iteration has changed stays in its repeat",
        "Repeats._run_twice_at_most",
        "saved.restore()",
        "pass",
        "tests/megatron/test_repeat.py::test_every_tensor_is_that_of_a_larger_bound[inputs]",
    ),
    Mutation(
        "a graph is captured before its row bound is measured",
        "Iterations._measure",
        "leave_graphs()",
        "pass",
        "tests/megatron/test_repeat.py::test_no_graph_is_captured_while_a_bound_is_measured",
    ),
    Mutation(
        "a backward waits for ranks that have put its error off",
        "Backend.backward",
        "isinstance(saved, NaNResult) and saved.is_put_off",
        "False",
        "tests/unit/test_attempts.py::test_separate_kernels_give_nan_until_they_are_exact",
        "tests/gpu/test_attempts.py::test_all_steps_end_and_a_repeat_fits",
    ),
    Mutation(
        "the launcher ignores flags that no parser takes",
        "check_flags_are_read",
        "sorted(unread_flags)",
        "()",
        "tests/megatron/test_command_line.py::test_launcher_refuses_a_flag_that_no_parser_takes",
    ),
    Mutation(
        "every rank prints an error under the launcher",
        "_end",
        'is_first("print an error")',
        "True",
        "tests/megatron/test_command_line.py::test_launcher_prints_an_error_once_as_one_line",
    ),
    Mutation(
        "the doctor names the kernel where another backend ran",
        "_run",
        "moe.backend.within.kind",
        '"kernel"',
        "tests/unit/test_doctor.py::test_a_layer_runs_without_a_gpu",
    ),
    Mutation(
        "the doctor overlooks GPUs that do not reach each other in one direction",
        "unreachable",
        "itertools.permutations",
        "itertools.combinations",
        "tests/unit/test_doctor.py::test_gpus_that_do_not_reach_each_other",
    ),
    Mutation(
        "an expert of another rank of transformers is taken for the first here",
        "experts_forward",
        "masked_fill(is_elsewhere, -1)",
        "masked_fill(is_elsewhere, 0)",
        "tests/frameworks/test_transformers.py::test_a_module_keeps_no_trace",
    ),
    Mutation(
        "a function of Bridge's writes over our dispatcher's name",
        "_as_stock.make.run",
        "if has_our_name(config)",
        "if False",
        "tests/megatron/test_replaces.py::test_checks_and_writers_of_bridge_leave_our_name",
    ),
    Mutation(
        "additions to experts' matrices are not scaled",
        "Addition.sums",
        "alpha=self.scale",
        "alpha=1",
        "tests/megatron/test_lora.py::test_adapters_are_computed_as_beside_alltoall",
    ),
    Mutation(
        "the gradient of a factor takes rows that are no expert's",
        "ExpertRows._grouped_sums",
        "begins[:-1] + counts",
        "begins[1:]",
        "tests/unit/test_low_rank.py::test_sums_leave_out_what_lies_between_experts",
        on_gpu="tests/gpu/test_adapted.py::test_where_rows_lie",
    ),
    Mutation(
        "launches over several hosts leave factors the gradients of the last",
        "FactorGrads._add",
        "part if grad is None else grad + part",
        "part",
        "tests/unit/test_low_rank.py::test_gradients_of_factors",
    ),
    Mutation(
        "factors' gradients of a backward that some rank lacks look right",
        "BackwardRows.give",
        "header[-1] != 0",
        "header[-1] < 0",
        "tests/unit/test_backward_rows.py::test_factors_take_them",
    ),
    Mutation(
        "Bridge's dropout on experts' adapters is left out without a word",
        "HeldExperts._check_modules",
        "if problem := problem_of(module):",
        "if problem := None:",
        "tests/megatron/test_lora.py::test_what_is_not_computed_is_refused",
    ),
    Mutation(
        "tokens that Automodel's mask excludes go to experts",
        "run_experts",
        "indices.masked_fill(~token_mask.unsqueeze(-1), -1)",
        "indices",
        "tests/frameworks/test_automodel.py::test_experts_compute_what_the_stock_ones_do",
    ),
    Mutation(
        "Automodel changes the dispatcher to its own without a word",
        "_checked.post_init",
        "self.experts not in _EXPERTS",
        "False",
        "tests/frameworks/test_automodel.py::test_experts_that_would_take_the_layer_away_are_refused",
    ),
    Mutation(
        "transposed experts of transformers are as wide as their rows are many",
        "read_shape",
        "rows, hidden = hidden, rows",
        "pass",
        "tests/frameworks/test_transformers.py::test_rows_are_found_where_a_class_has_them",
    ),
    Mutation(
        "alternating gate and up rows of transformers are read as halves",
        "_candidates",
        "int(gated and not experts.is_concatenated)",
        "0",
        "tests/frameworks/test_transformers.py::test_rows_are_found_where_a_class_has_them",
    ),
    Mutation(
        "outputs under autocast have its dtype and not the tokens'",
        "apply",
        ".to(x.dtype)",
        "",
        "tests/frameworks/test_transformers.py::test_autocast_gives_back_the_dtype_of_the_tokens",
    ),
    Mutation(
        "buckets of DeepSpeed have as many elements as fit bytes",
        "size_buckets",
        "max(plan.piece_bytes // size, 1)",
        "max(plan.piece_bytes, 1)",
        "tests/deepspeed/test_training.py::test_buckets_have_the_size_of_what_fits_gaps",
    ),
    Mutation(
        "every call with a map is refused",
        "_one_routing",
        "routing_map.dtype != torch.bool",
        "routing_map.dtype is not None",
        "tests/fuzz/test_public_api.py::test_moe_apply",
    ),
    Mutation(
        "the router's factor scales no probability",
        "probs_of",
        "* factor",
        "",
        "tests/fuzz/test_public_api.py::test_moe_router_forward",
    ),
    Mutation(
        "over hosts nothing is offloaded",
        "choose",
        "kept if isinstance(kept, list) else",
        "",
        "tests/megatron/test_offload.py::test_what_is_offloaded_gives_the_same_training",
    ),
    Mutation(
        "a lookahead predicts from logits without their sigmoid",
        "_predict",
        ".sigmoid()",
        "",
        "tests/megatron/test_replicas.py::test_a_lookahead_adds_the_bias_of_experts_to_sigmoids",
    ),
    Mutation(
        "products are taken to be half as large",
        "_products",
        "2.0 * weights.numel()",
        "1.0 * weights.numel()",
        "tests/unit/test_schedule_fit.py::test_ranks_measure_and_choose_degrees",
    ),
    Mutation(
        "XMoE's auxiliary loss is that of its sigmoids",
        "choose_xmoe",
        "weights, softmax, ",
        "weights, logits.sigmoid(), ",
        "tests/unit/test_gates.py::test_xmoe_is_its_loop",
    ),
    Mutation(
        "shares are rounded after every host",
        "sum_of_shares",
        "torch.float64 if like.dtype == torch.float64 else torch.float32",
        "like.dtype",
        "tests/unit/test_hosts.py::test_shares_of_hosts_are_rounded_once",
    ),
    Mutation(
        "weights of NaN beside indices are not refused over hosts",
        "of",
        "is_bad |= (weights.isnan() & (experts >= 0)).any(1)",
        "pass",
        "tests/unit/test_hosts.py::test_a_refusal_of_one_rank_ends_the_call_on_all_hosts",
    ),
    Mutation(
        "what stays on a host counts as crossed",
        "exchange",
        "- send_counts[self.grid.host]",
        "",
        "tests/unit/test_hosts.py::test_a_token_crosses_once_to_each_host",
    ),
    Mutation(
        "results pushed over hosts are told as rows pulled",
        "take_records",
        "record.results_pushed",
        "record.rows_pulled",
        "tests/unit/test_hosts.py::test_records_have_ranks_at_their_places_in_the_group",
    ),
    Mutation(
        "replicas over hosts are told by their number within the host",
        "take_records",
        "return first + place",
        "return place",
        "tests/unit/test_hosts.py::test_records_have_ranks_at_their_places_in_the_group",
    ),
    Mutation(
        "a host takes its own experts as guests",
        "plan_guests",
        "pool[every, :, every] = 0",
        "",
        "tests/unit/test_hosts.py::test_each_host_takes_what_most_of_its_own_routes_choose",
    ),
    Mutation(
        "gradients of guests are those of the call before",
        "_backward",
        "self._with_guests(plan, weights)",
        "self._with_guests(None, weights if guests is None else guests.with_own(weights))",
        "tests/unit/test_hosts.py::test_experts_spread_over_hosts_change_no_bit",
    ),
    Mutation(
        "a backend over hosts that grows forgets what it has sent",
        "traffic",
        "sum(part.rows_sent for part in parts)",
        "parts[-1].rows_sent",
        "tests/unit/test_hosts.py::test_a_backend_that_has_grown_counts_what_it_sent_before",
    ),
    Mutation(
        "a rank without layers has no calibration",
        "agree_calibration",
        "Ranks(group).gather(calibration)",
        "[calibration]",
        "tests/unit/test_telemetry_reports.py"
        "::test_a_group_of_some_ranks_agrees_on_its_own_calibration",
    ),
    Mutation(
        "an error of one rank's system leaves the others waiting",
        "all",
        "except Exception as error:",
        "except FlashMoEError as error:",
        "tests/unit/test_multipath.py::test_what_one_rank_cannot_make_no_rank_waits_for",
    ),
    Mutation(
        "the last reason of a failure takes the place of the first",
        "post",
        "notice(memory) is None",
        "True",
        "tests/unit/test_multipath.py::test_the_first_reason_of_a_failure_stays",
    ),
    Mutation(
        "counters end at their last number",
        "has_counted",
        "(int(word.value) - count) & 0xFFFFFFFF < 2**31",
        "int(word.value) >= count",
        "tests/unit/test_rings.py::test_a_counter_goes_on_past_its_last_number",
    ),
    Mutation(
        "strided tensors at a known address are not refused",
        "_gather_of",
        "and output.is_contiguous() and input.is_contiguous()",
        "",
        "tests/unit/test_rings.py::test_a_known_address_does_not_make_a_tensor_contiguous",
    ),
    Mutation(
        "ranks decide apart whether links are faster",
        "is_won",
        "greatest(self._ranks.gather(own))",
        "own",
        "tests/unit/test_trials.py::test_links_have_to_win_by_a_margin_on_the_slowest_rank",
    ),
    Mutation(
        "experts are never reduced again after a backward that failed",
        "_note_forward",
        "self._is_queued = False",
        "pass",
        "tests/unit/test_data_parallel.py"
        "::test_experts_are_reduced_behind_a_backward_that_has_failed",
    ),
    Mutation(
        "a rank gets more blocks than with every expert at home",
        "_accept",
        "max(blocks_left, blocks_there) > self.most_blocks or",
        "",
        "tests/replicas/test_balance.py::test_fewer_rows_are_not_bought_with_more_blocks",
    ),
    Mutation(
        "an unused gap is added to later ones",
        "_start_what_fits",
        "self._room = 0.0",
        "pass",
        "tests/unit/test_gradient_slices.py"
        "::test_a_gap_without_pieces_leaves_no_room_to_later_ones",
    ),
    Mutation(
        "a bound leaves out rows of ranks that share experts",
        "_blocks_of_ranks",
        "or self._tensor is not None",
        "",
        "tests/unit/test_scheduled.py"
        "::test_rows_of_all_ranks_that_share_experts_count_in_the_bound",
    ),
    Mutation(
        "a hook that comes after a call is not looked at",
        "add",
        "self._probed.clear()",
        "pass",
        "tests/unit/test_hooks.py"
        "::test_hooks_that_change_shapes_are_refused_on_every_rank_before_rows_are_sent",
    ),
    Mutation(
        "every rank's locality is that of rank 0",
        "make",
        "sent[self._rank]",
        "sent[0]",
        "tests/unit/test_scheduled.py::test_ranks_are_the_reference_and_hosts_change_no_bit",
    ),
    Mutation(
        "a view's gradient takes other memory than its base's",
        "store",
        "buffer._base is None and",
        "",
        "tests/unit/test_scheduled.py::test_a_gradient_that_is_a_view_is_written_where_it_is",
    ),
    Mutation(
        "one rank takes a fit that several would refuse",
        "_computed",
        "read_fit(path, None, dtype)",
        "pass",
        "tests/unit/test_schedule_fit.py::test_one_rank_wants_the_fit_that_several_want",
    ),
    Mutation(
        "slots on one rank do nothing without a word",
        "_make_backend",
        "config.num_ranks == 1 and",
        "config.num_ranks == 0 and",
        "tests/unit/test_select.py::test_slots_on_one_rank_are_said_to_do_nothing",
    ),
    Mutation(
        "the memory of slots is looked at on several ranks alone",
        "KernelBackend.__init__",
        "if self.options.filled_slots",
        "if self.spare_slots",
        "tests/unit/test_group_memory.py"
        "::test_slots_that_take_too_much_memory_are_refused_on_one_rank_too",
    ),
    Mutation(
        "replicas are described that one rank does not have",
        "_announce",
        "and backend.config.num_ranks > 1",
        "",
        "tests/megatron/test_ignored.py::test_replicas_are_described_where_there_are_other_ranks",
    ),
    Mutation(
        "an unknown option is compared with names that are nothing like it",
        "nearest",
        "names, n=1",
        "names, n=1, cutoff=0.0",
        "tests/unit/test_options.py::test_an_unknown_option_that_is_like_none_gets_all_names",
    ),
    Mutation(
        "a token of NaN is told as its router's weight",
        "_apply_choices",
        "topk_weight, x",
        "topk_weight",
        "tests/unit/test_gates.py::test_every_rank_hears_of_the_token_of_nan",
    ),
    Mutation(
        "selective checkpointing keeps tensors that a backend writes into",
        "unseen",
        "_disable_current_modes() if _num_modes() else",
        "",
        "tests/unit/test_separate.py"
        "::test_what_a_checkpoint_saves_of_a_forward_changes_no_gradient",
    ),
    Mutation(
        "experts of transformers keep what they computed in their first call",
        "_seat",
        "self._held.change(reading.look()) is not None",
        "False",
        "tests/frameworks/test_changed_experts.py::test_a_change_is_computed_whenever_it_comes",
    ),
    Mutation(
        "experts that were pruned or widened keep the sizes that they had",
        "_apply",
        "sizes if num_ranks == 1 else None",
        "None",
        "tests/frameworks/test_changed_experts.py"
        "::test_a_change_is_computed_whenever_it_comes[wider]",
    ),
    Mutation(
        "a gate that is replaced on a class is ignored",
        "holding_of",
        'getattr(type(experts), "_apply_gate", None)',
        "None",
        "tests/frameworks/test_changed_experts.py::test_a_change_is_computed_whenever_it_comes",
    ),
    Mutation(
        "an attribute of a function that experts hold is ignored",
        "_note",
        "self._is_whole and callable(value) and type(_vars(value)) is dict",
        "False",
        "tests/frameworks/test_changed_experts.py::test_a_change_is_refused_whenever_it_comes",
    ),
    Mutation(
        "hooks on the experts' activation are not called, and nobody says so",
        "holding_of",
        "find_touched(below)",
        "find_touched([])",
        "tests/frameworks/test_changed_experts.py::test_a_change_is_refused_whenever_it_comes",
    ),
    Mutation(
        "experts are read again after each step of ZeRO-3",
        "_watched",
        "and not name.startswith(_ENGINES_PREFIXES)",
        "",
        "tests/frameworks/test_changed_experts.py"
        "::test_experts_are_read_once_where_nothing_says_what_they_compute",
    ),
    Mutation(
        "experts are read again after each step of pruned parameters",
        "_registered",
        "not name.startswith(self._prefixes)",
        "name not in self._ignored",
        "tests/frameworks/test_changed_experts.py"
        "::test_experts_are_read_once_where_nothing_says_what_they_compute",
    ),
    Mutation(
        "modules are kept alive by what they hold",
        "_ref",
        "weakref.ref(value)",
        "lambda: value",
        "tests/frameworks/test_changed_experts.py::test_experts_are_given_up_with_their_module",
    ),
    Mutation(
        "hooks on all modules see the rows of the proof",
        "as_in_no_other_call",
        "for registry in _HOOKS_OF_ALL: registry.clear()",
        "for registry in (): registry.clear()",
        "tests/frameworks/test_changed_experts.py::test_nobody_sees_the_rows_of_the_proof",
    ),
    Mutation(
        "function modes see the rows of the proof",
        "as_in_no_other_call",
        "torch._C.DisableTorchFunction(),",
        "",
        "tests/frameworks/test_changed_experts.py::test_nobody_sees_the_rows_of_the_proof",
    ),
    Mutation(
        "a function is proved in one of the experts' modes alone",
        "_read_activation",
        "for mode in (True, False)",
        "for mode in (False, False)",
        "tests/frameworks/test_changed_experts.py::test_a_change_is_refused_whenever_it_comes",
    ),
    Mutation(
        "a rank that refuses its experts leaves the others waiting",
        "_seat",
        "ranks.all(lambda: (reading.look(), reading.shape())[1], alike=facts_of)",
        "[(reading.look(), reading.shape())[1]]",
        "tests/frameworks/test_changed_experts.py::test_ranks_that_differ_are_told_of_it_on_all",
    ),
    Mutation(
        "experts of one rank that change are computed as they were",
        "checked",
        "self._check_unchanged(seat, reading)",
        "pass",
        "tests/frameworks/test_changed_experts.py::test_ranks_that_differ_are_told_of_it_on_all",
    ),
    Mutation(
        "tokens of another dtype than the experts' are refused",
        "apply",
        "x.to(dtype)",
        "x",
        "tests/frameworks/test_changed_experts.py"
        "::test_tokens_of_another_dtype_are_computed_in_the_experts",
    ),
    Mutation(
        "transposed parameters of experts are refused",
        "read",
        "if weight.stride(-1) == 1 else weight.contiguous()",
        "",
        "tests/frameworks/test_changed_experts.py::test_transposed_parameters_are_computed",
    ),
    Mutation(
        "DeepSpeed's experts keep the function that they had when flashmoe was attached",
        "Watched.check_unchanged",
        "self._held.change(holding)",
        "None",
        "tests/deepspeed/test_forwards.py::test_what_modules_hold_is_noticed_later",
    ),
    Mutation(
        "a change that matters to one rank of DeepSpeed's is taken for one that does not",
        "_checked_weights",
        "_read_form(self)[0] == self.form",
        "True",
        "tests/deepspeed/test_attach.py"
        "::test_what_experts_hold_later_on_one_rank_ends_the_call_on_every_rank",
    ),
    Mutation(
        "ranks of DeepSpeed may compute different functions",
        "_agree",
        "_difference(name, [its_facts for *_, its_facts in everyone]) or",
        "",
        "tests/deepspeed/test_attach.py::test_refusal_and_fallback",
    ),
    Mutation(
        "an average of two ranks overflows where their sum would",
        "sum_in_order",
        "and not average",
        "",
        "tests/unit/test_multipath.py::test_sums_are_rounded_once_and_in_rank_order",
    ),
    Mutation(
        "ranks note other transfers where only some have their own part to copy",
        "exchange",
        "is_next_timed()",
        "is_next_timed() or meanwhile is not None",
        "tests/unit/test_rings.py::test_ranks_take_note_of_the_same_transfers",
    ),
    Mutation(
        "every gather by two links is timed, which holds a GPU up",
        "moment",
        "if is_timed else queue.record_event()",
        "",
        "tests/unit/test_rings.py::test_a_gather_by_two_links_is_timed_one_time_in_eight",
    ),
    Mutation(
        "a gather does not wait for the relay's part",
        "join",
        "self.link.await_end(self._stream, self._end_number)",
        "pass",
        "tests/unit/test_rings.py::test_gathers_without_a_detour_have_shares_of_their_own",
    ),
    Mutation(
        "a rank that has not come is not named by those that wait for it",
        "_state",
        "made < call.number",
        "made + 1 < call.number",
        "tests/unit/test_watchdog.py::test_a_peer_that_stands_still_is_named",
    ),
    Mutation(
        "a link goes on whose partner has failed",
        "fail",
        "for partner in self.partners: partner.fail(error)",
        "pass",
        "tests/unit/test_rings.py::test_links_fail_together",
    ),
    Mutation(
        "times of a transfer move shares by which it has not gone",
        "observe",
        "shares != known.shares",
        "False",
        "tests/unit/test_trials.py::test_ranks_have_the_same_shares_when_a_link_comes_back",
    ),
    Mutation(
        "a slot for all is filled while one of its receivers still copies out of it",
        "send_to_all",
        "for ring in rings: ring.await_slot()",
        "rings[0].await_slot()",
        "tests/unit/test_rings.py::test_what_is_for_all_is_sent_once",
    ),
    Mutation(
        "the watch takes a copy that has only been offered for one that has arrived",
        "is_over",
        "self.link.has_arrived(self.number)",
        "self.has_begun()",
        "tests/unit/test_rings.py::test_a_peer_that_stays_away_is_named",
    ),
    Mutation(
        "a stream behind direct copies waits for offers in place of arrivals",
        "_open",
        "_Mark(self, board.WRITTEN)",
        "_Mark(self, board.OFFERED)",
        "tests/unit/test_rings.py"
        "::test_copies_beside_each_other_wait_for_the_first_stream_and_it_for_them",
    ),
    Mutation(
        "a stream with direct copies waits for its own offer in place of its peers'",
        "_Mark.__init__",
        "link.headers[peer] + offset for peer in link.peers",
        "link.headers[link.rank] + offset for _ in link.peers",
        "tests/unit/test_rings.py"
        "::test_copies_beside_each_other_wait_for_the_first_stream_and_it_for_them",
    ),
    Mutation(
        "what was broken off while it was issued is not let go",
        "_run",
        "self._link.broken is not None",
        "False",
        "tests/unit/test_rings.py::test_closing_lets_go_of_late_peers",
    ),
    Mutation(
        "memory that one rank cannot share is asked for in every call",
        "share",
        "self._can_share and",
        "",
        "tests/unit/test_rings.py::test_tensors_that_are_shared_are_written_to",
    ),
    Mutation(
        "a slice of gradients does not wait until these are complete",
        "put",
        "streams.mark(self._device)",
        "None",
        "tests/unit/test_gradient_slices.py"
        "::test_pieces_start_in_order_where_they_fit_once_they_are_complete",
    ),
    Mutation(
        "keep is left out of what ranks agree on",
        "_ALWAYS",
        '"keep",',
        "",
        "tests/unit/test_select.py::test_ranks_must_agree_on_what_is_kept",
    ),
    Mutation(
        "a wait for rows counts as exposed while processors compute",
        "_add_phases",
        "min(phases[Phase.ROWS_WAIT], idle)",
        "phases[Phase.ROWS_WAIT]",
        "tests/unit/test_telemetry.py"
        "::test_a_wait_for_rows_is_exposed_no_longer_than_the_processors_are_idle",
    ),
    Mutation(
        "a host that knows of a fault launches as if it did not",
        "_raise_shared",
        "self._can_share and self.memory.has_shared_fault",
        "False",
        "tests/unit/test_in_step.py::test_hosts_that_wait_raise_in_the_next_call",
        on_gpu="tests/gpu/test_in_step.py::test_all_raise_in_one_call",
    ),
    Mutation(
        "a rank that refuses a call takes no part in its backward",
        "_backward",
        "self._backward(none, saved.saved, weights, grads, factors)",
        "pass",
        "tests/unit/test_in_step.py::test_all_raise_in_one_call",
        on_gpu="tests/gpu/test_in_step.py::test_all_raise_in_one_call",
    ),
    Mutation(
        "a backward that is refused is not told to the other ranks",
        "_for_nobody",
        "self.put_off(error)",
        "pass",
        "tests/unit/test_in_step.py::test_a_backward_that_is_refused",
    ),
    Mutation(
        "hooks of experts go on serving where one of them has been frozen",
        "serve",
        "and list(map(_wants_grad, params)) == self._is_trained",
        "",
        "tests/megatron/test_ddp_hooks.py"
        "::test_a_frozen_expert_has_no_gradient_and_ddp_hears_of_the_others",
    ),
    Mutation(
        "fixed sizes have too little room at first: the first call makes a second backend",
        "HostsBackend.__init__",
        "every if self._is_fixed else",
        "",
        "tests/unit/test_one_host.py"
        "::test_fixed_sizes_have_room_for_the_tokens_of_all_hosts_at_once",
    ),
    Mutation(
        "backends that share a memory count their rows once each",
        "_distinct",
        'getattr(one, "memory", one)',
        "one",
        "tests/unit/test_one_host.py::test_backends_of_one_memory_count_once",
    ),
    Mutation(
        "records over hosts have ranks at wrong places",
        "take_records",
        "(0,) * here.start",
        "(0,) * self._rail.grid.host",
        "tests/unit/test_one_host.py::test_records_have_the_ranks_of_a_host_at_their_places",
    ),
    Mutation(
        "what crosses behind the first report is never told",
        "take_crossed",
        "dataclasses.replace(self._rail.crossed)",
        "self._rail.crossed",
        "tests/unit/test_one_host.py::test_each_report_has_what_has_crossed_since_the_last",
    ),
    Mutation(
        "a refusal takes part in one of a host's launches: the others wait",
        "launch",
        "for _ in range(launches[number]): self.within.refuse(reason)",
        "self.within.refuse(reason)",
        "tests/unit/test_one_host.py::test_a_refusal_takes_part_in_every_launch_of_the_host",
    ),
    Mutation(
        "the reason of a failure is replaced by hosts that have gone since",
        "_there_and_back",
        "stack.enter_context(contextlib.suppress(FlashMoEError))",
        "pass",
        "tests/unit/test_one_host.py"
        "::test_the_reason_of_a_failure_is_told_though_other_hosts_have_gone_since",
    ),
    Mutation(
        "a backward that fails within a host sends rows of another width",
        "_there_and_back",
        "min(topk, self._experts_per_host)",
        "topk",
        "tests/unit/test_one_host.py"
        "::test_what_a_backward_that_fails_sends_is_as_wide_as_other_hosts_expect",
    ),
    Mutation(
        "weights that are transposed since are not looked at",
        "Backend._check_weights",
        "device, weights.transposed,",
        "device,",
        "tests/unit/test_one_host.py::test_weights_that_are_transposed_since_are_looked_at_again",
    ),
    Mutation(
        "a refusal sends rows of another dtype",
        "refuse",
        ", dtype=self._dtype",
        "",
        "tests/unit/test_one_host.py::test_a_refusal_takes_part_in_every_launch_of_the_host",
    ),
    Mutation(
        "with fixed sizes nobody refuses an unusable routing",
        "of",
        "torch.where(choices.is_bad, experts_per_host, own)",
        "own",
        "tests/unit/test_one_host.py::test_with_fixed_sizes_a_host_refuses_its_own_tokens_routing",
    ),
    Mutation(
        "a launch without routes has no locality",
        "locality",
        "if total else 1.0",
        "if total else 0.0",
        "tests/replicas/test_popular.py::test_routes_that_stay_on_their_rank",
    ),
    Mutation(
        "ranks with different fits have different degrees: a deadlock",
        "_agreed",
        "len(set(everyone)) > 1",
        "False",
        "tests/unit/test_schedule_fit.py::test_ranks_measure_and_choose_degrees",
    ),
    Mutation(
        "every fit looks good",
        "fit_line",
        "whole = sum((t - mean) ** 2 for t in times_s)",
        "whole = sum(t**2 for t in times_s)",
        "tests/unit/test_schedule_fit.py"
        "::test_a_line_that_tells_nothing_has_no_share_of_the_variance",
    ),
    Mutation(
        "sizes do not span what they should",
        "even_ratios",
        "(points - 1)",
        "points",
        "tests/unit/test_schedule_fit.py::test_sizes_are_at_even_ratios_from_a_part_to_the_most",
    ),
    Mutation(
        "SoftMoE refuses tokens of four dimensions",
        "forward",
        ".reshape(-1, x.shape[-2], width)",
        "",
        "tests/unit/test_gates.py::test_tokens_may_have_any_number_of_dimensions",
    ),
    Mutation(
        "scores begin too close to each other",
        "_scorer",
        "math.sqrt(width)",
        "width",
        "tests/unit/test_gates.py::test_scores_begin_as_those_of_a_linear_layer",
    ),
    Mutation(
        "without a capacity second choices are never left out",
        "choose_gshard",
        "kept = tried\n",
        "kept = torch.ones_like(tried)",
        "tests/unit/test_gates.py"
        "::test_gshard_without_a_capacity_drops_nothing_and_tries_second_choices_all_the_same",
    ),
    Mutation(
        "ZeRO fills the buffer of a bucket that waits for a gap",
        "_take_aside",
        "torch.empty_like(bucket.buffer[bucket.index])",
        "bucket.buffer[bucket.index]",
        "tests/deepspeed/test_slices.py::test_buckets_wait_for_gaps_and_losses_are_the_same",
    ),
    Mutation(
        "the host waits for a gate's counts",
        "routes_to",
        "places.masked_fill(places < 0, num_experts)",
        "places[places >= 0]",
        "tests/unit/test_gates.py::test_the_host_reads_nothing_of_a_gate",
    ),
    Mutation(
        "gradients of X-MoE's parameters stay on each of the ranks that share a sequence",
        "__init__",
        "parameter.sequence_parallel = config.sequence_parallel",
        "parameter.sequence_parallel = False",
        "tests/megatron/test_gates.py::test_a_gate_trains_alike_with_and_without_tensor_parallelism",
    ),
    Mutation(
        "Megatron's auxiliary loss of GShard is that of two counted choices",
        "__init__",
        "self.topk = 1 ",
        "self.topk = 2 ",
        "tests/megatron/test_gates.py::test_a_router_chooses_balances_and_logs_as_its_gate",
    ),
    Mutation(
        "what the user has told DDP to leave out is forgotten",
        "prepare_for_ddp",
        "ignored += [name for name in getattr(model, _IGNORED, ()) if name not in ignored]",
        "pass",
        "tests/unit/test_data_parallel.py::test_what_is_refused",
    ),
    Mutation(
        "groups of different sizes are accepted",
        "_problem",
        "or len({len(one) for one in groups}) > 1",
        "",
        "tests/unit/test_data_parallel.py::test_groups_of_experts_divide_the_ranks_evenly",
    ),
    Mutation(
        "an evaluation without sync between forward and backward leaves gradients unreduced",
        "_note_forward",
        "and torch.is_grad_enabled()",
        "",
        "tests/unit/test_data_parallel.py"
        "::test_an_evaluation_before_a_backward_leaves_its_reduction",
    ),
    Mutation(
        "a mesh of two dimensions is accepted",
        "ExpertGroup.__init__",
        "group.ndim != 1",
        "False",
        "tests/unit/test_data_parallel.py::test_what_is_refused",
    ),
    Mutation(
        "buckets are larger by an element's bytes",
        "size_buckets",
        "max(plan.piece_bytes // size, 1)",
        "max(plan.piece_bytes, 1)",
        "tests/deepspeed/test_slices.py::test_buckets_have_as_many_elements_as_fit",
    ),
    Mutation(
        "gradients that nobody shares are taken to be reduced",
        "size_buckets",
        "* is_reduced[True]",
        "",
        "tests/deepspeed/test_slices.py::test_buckets_have_as_many_elements_as_fit",
    ),
    Mutation(
        "buckets of which some are due are not reduced",
        "_reduces",
        "any(group.is_last_microbatch for group in self._groups)",
        "all(group.is_last_microbatch for group in self._groups)",
        "tests/megatron/test_ddp_hooks.py"
        "::test_a_bucket_in_its_last_micro_batch_is_due_whatever_the_others_are_in",
    ),
    Mutation(
        "stages of a pipeline count as ranks with the same experts",
        "reduces_experts",
        "stages * number",
        "number",
        "tests/megatron/test_communicators.py::test_how_much_fits",
    ),
    Mutation(
        "a dry run of one process waits for ranks that are made up",
        "_of",
        'dist.get_backend(group) == "fake"',
        "False",
        "tests/megatron/test_peers.py::test_ranks_that_are_made_up_are_not_waited_for",
    ),
    Mutation(
        "a replaced layer's inputs are freed under Megatron's schedule",
        "should_free_input",
        "if is_ours(config):",
        "if False and is_ours(config):",
        "tests/megatron/test_replaces.py::test_inputs_outlive_a_layer_of_ours_under_another_name",
    ),
    Mutation(
        "a configuration that opts out is replaced all the same",
        "why_kept",
        "getattr(config, _KEEPS, False)",
        "getattr(config, _SERVED, False)",
        "tests/megatron/test_replaces.py::test_a_configuration_opts_out_before_it_is_used",
    ),
    Mutation(
        "ranks compare the name in the configuration",
        "effective_name",
        "DISPATCHER_TYPE if is_ours(config) else str(name_of(config))",
        "str(name_of(config))",
        "tests/megatron/test_replaces.py::test_ranks_compare_the_dispatcher_in_effect",
    ),
    Mutation(
        "only the first weight of a module is reduced",
        "reduce_gradients",
        'getattr(module, "wgrad_accumulation_and_reduce_hooks", ())',
        'getattr(module, "wgrad_accumulation_and_reduce_hooks", ())[:1]',
        "tests/megatron/test_schedule.py"
        "::test_every_weight_of_a_module_is_reduced_and_the_last_modules_first",
    ),
    Mutation(
        "launches go on with addresses of the old heap",
        "allocate",
        "self._groups.clear()",
        "pass",
        "tests/unit/test_group_memory.py::test_launches_go_on_in_the_memory_that_was_made_last",
    ),
    Mutation(
        "a new heap is taken to have the old one's replicas",
        "allocate",
        "self.settled_for = None",
        "pass",
        "tests/unit/test_group_memory.py::test_launches_go_on_in_the_memory_that_was_made_last",
    ),
    Mutation(
        "a fault is given up sooner since there was one before",
        "take_fault",
        "self._known_since = None",
        "pass",
        "tests/unit/test_group_memory.py::test_each_fault_has_its_own_time",
    ),
    Mutation(
        "NVLink multicast is used",
        "_interface",
        'os.environ["NVSHMEM_DISABLE_NVLS"] = "1"',
        "pass",
        "tests/unit/test_group_memory.py"
        "::test_no_rank_signals_into_memory_that_another_still_zeroes",
    ),
    Mutation(
        "a signal into memory that is being zeroed is lost",
        "allocate",
        "ranks.meet()",
        "pass",
        "tests/unit/test_group_memory.py"
        "::test_no_rank_signals_into_memory_that_another_still_zeroes",
    ),
    Mutation(
        "tables of weights that move pile up",
        "_remember",
        "if len(tables) >= MOST_LAYERS: if tables is self._of_weights: "
        "self._memory.captured.keep_left(*tables.values()) tables.clear()",
        "pass",
        "tests/unit/test_stacks.py::test_tables_of_weights_that_move_do_not_pile_up",
    ),
    Mutation(
        "tables of weights end with a layer that graphs outlive",
        "__init__",
        "weakref.finalize(self, memory.captured.keep_left, self._of_weights).atexit = False",
        "pass",
        "tests/unit/test_tables.py::test_tables_that_a_graph_reads_outlive_their_layers",
    ),
    Mutation(
        "rows of replicas do not fit a bound that they are within",
        "bounded_row_blocks",
        "+ spare_slots",
        "",
        "tests/unit/test_in_step.py::test_a_bound_has_room_for_a_block_of_each_spare_slot",
    ),
    Mutation(
        "others reduce gradients that have not been handed on yet",
        "_backward",
        "number if written.are_own else 0",
        "number",
        "tests/unit/test_in_step.py"
        "::test_gradients_that_are_handed_on_are_complete_with_their_backward_alone",
    ),
    Mutation(
        "a refused forward leaves its replicas to the next one",
        "refuse",
        "self.memory.settled_for = None",
        "pass",
        "tests/unit/test_in_step.py::test_another_launch_ends_what_was_settled",
    ),
    Mutation(
        "a table is kept for gradients that are gone",
        "of_grads",
        "not is_added or num_grads",
        "num_grads",
        "tests/unit/test_tables.py::test_gradients_of_another_size_at_known_addresses_are_refused",
    ),
    Mutation(
        "launches on two streams share memory at once",
        "_follow",
        "last is not None and not torch.cuda.is_current_stream_capturing()",
        "False",
        "tests/unit/test_group_memory.py"
        "::test_launches_on_another_stream_are_behind_those_on_the_last",
    ),
    Mutation(
        "a graph captures a lookahead that no replay asks for",
        "settle",
        "torch.cuda.is_current_stream_capturing()",
        "False",
        "tests/unit/test_in_step.py::test_another_launch_ends_what_was_settled",
    ),
    Mutation(
        "keeping all is said to cost time",
        "ignored_settings",
        'not in ("auto", "all")',
        '!= "auto"',
        "tests/megatron/test_ignored.py::test_keeping_less_of_what_is_recomputed_is_said",
    ),
    Mutation(
        "autocast does not reach experts",
        "outside_autocast",
        "torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else",
        "",
        "tests/frameworks/test_transformers.py"
        "::test_autocast_reaches_experts_in_a_seat_of_their_own",
    ),
    Mutation(
        "evaluation counts as training",
        "apply",
        "seat.is_training = is_training",
        "pass",
        "tests/frameworks/test_transformers.py::test_records_tell_evaluation",
    ),
    Mutation(
        "the norm after each expert is left out",
        "_apply_normed",
        "getattr(experts, NORM)(out) * factors",
        "out * factors",
        "tests/frameworks/test_transformers.py::test_a_norm_after_each_expert_is_the_modules_own",
    ),
    Mutation(
        "experts that are no stack fail without a name",
        "read_shape",
        "fc1.dim() != 3",
        "False",
        "tests/frameworks/test_transformers.py::test_experts_that_are_no_stack_are_refused_by_name",
    ),
    Mutation(
        "experts in another dtype take the seat of the first",
        "apply",
        "key = x.device, expert_idx.shape[-1], dtype",
        "key = x.device, expert_idx.shape[-1], torch.float32",
        "tests/frameworks/test_transformers.py"
        "::test_autocast_reaches_experts_in_a_seat_of_their_own",
    ),
    Mutation(
        "exchanges are taken to be four times as slow",
        "_exchanges",
        "one.nbytes",
        "one.numel()",
        "tests/unit/test_schedule_fit.py::test_ranks_measure_and_choose_degrees",
    ),
    Mutation(
        "times are the fastest rank's",
        "_medians",
        "self._ranks.most",
        "self._ranks.least",
        "tests/unit/test_schedule_fit.py::test_ranks_measure_and_choose_degrees",
    ),
    Mutation(
        "all ranks measure with the same routes",
        "RandomLayer.__init__",
        "manual_seed(backend.rank)",
        "manual_seed(0)",
        "tests/unit/test_schedule_fit.py::test_routes_to_be_timed_differ_between_ranks",
    ),
    Mutation(
        "launches of before training are in the first report",
        "Reporter.__init__",
        "self._take_records()",
        "pass",
        "tests/unit/test_telemetry_reports.py::test_what_was_before_the_first_step_is_in_no_report",
    ),
    Mutation(
        "DDP hears of experts before the last accumulator has run",
        "arrive",
        "if this.num_arrived < len(this.params): return",
        "pass",
        "tests/megatron/test_ddp_hooks.py"
        "::test_what_autograd_brings_besides_is_added_unless_megatron_drops_it",
    ),
    Mutation(
        "the mark of a gradient that a launch has added is left on the parameter",
        "_tell",
        "owner.grad_added_to_main_grad = is_marked",
        "pass",
        "tests/megatron/test_ddp_hooks.py"
        "::test_what_autograd_brings_besides_is_added_unless_megatron_drops_it",
    ),
    Mutation(
        "with fusion what autograd brings is added to what launches have added",
        "begin",
        "param.grad_added_to_main_grad = True",
        "pass",
        "tests/megatron/test_ddp_hooks.py"
        "::test_what_autograd_brings_besides_is_added_unless_megatron_drops_it",
    ),
    Mutation(
        "hooks on gradient accumulators see nothing",
        "_is_seen",
        "sum(map(len, self._on_accumulators)) != own or",
        "",
        "tests/megatron/test_ddp_hooks.py::test_what_others_have_to_see_they_see",
    ),
    Mutation(
        "graphs hold the tables of buffers that move",
        "_remember",
        "if tables is self._of_weights",
        "if True",
        "tests/unit/test_tables.py"
        "::test_graphs_hold_the_tables_of_gradients_that_they_have_captured_alone",
    ),
    Mutation(
        "a graph reads a table of gradients that has been forgotten",
        "of_grads",
        "elif torch.cuda.is_current_stream_capturing()",
        "elif False",
        "tests/unit/test_tables.py"
        "::test_graphs_hold_the_tables_of_gradients_that_they_have_captured_alone",
    ),
    Mutation(
        "an evaluation's scratch lies over its plan",
        "_forward",
        "of_plan + scratch_at if scratch is None",
        "of_plan if scratch is None",
        "tests/unit/test_operators.py::test_what_has_no_memory_of_its_own_follows_the_plan",
    ),
    Mutation(
        "an evaluation's rows lie over its scratch",
        "KernelBackend._make_buffers",
        "rows_at = sizes.plan_bytes + scratch_bytes",
        "rows_at = sizes.plan_bytes",
        "tests/unit/test_kept_rows.py::test_an_evaluation_needs_one_allocation_and_its_output",
    ),
    Mutation(
        "a backward finds its plan in memory of its forward's scratch",
        "KernelBackend._make_buffers",
        "plan is None and not training and not shows_rows",
        "plan is None and not shows_rows",
        "tests/unit/test_kept_rows.py::test_an_evaluation_needs_one_allocation_and_its_output",
    ),
    Mutation(
        "a forward does not look for a fault",
        "KernelBackend._open",
        "memory.fault_code.value or ",
        "",
        "tests/unit/test_each_call.py::test_a_fault_is_raised",
    ),
    Mutation(
        "a forward takes memory that was given up",
        "KernelBackend._open",
        " or memory.needs(self._sizes)",
        "",
        "tests/unit/test_each_call.py::test_memory_that_is_void_is_made_again",
    ),
    Mutation(
        "a backward does not look for a fault",
        "KernelBackend._backward",
        "memory.fault_code.value or ",
        "",
        "tests/unit/test_each_call.py::test_a_fault_is_raised",
    ),
    Mutation(
        "a backward takes memory that was given up",
        "KernelBackend._backward",
        " or memory.needs(self._sizes)",
        "",
        "tests/unit/test_each_call.py::test_memory_that_is_void_is_made_again",
    ),
    Mutation(
        "a code of a fault is read from a mailbox that is gone",
        "GroupMemory.allocate",
        "self._heap, self.heap_bytes, self.fault_code = None, 0, ctypes.c_uint32()",
        "self._heap, self.heap_bytes = None, 0",
        "tests/unit/test_each_call.py::test_memory_that_cannot_be_made_has_no_fault",
    ),
    Mutation(
        "a layout of weights is that of the last call",
        "KernelBackend._use_layout",
        "self._problem = None",
        "pass",
        "tests/unit/test_each_call.py::test_a_change_is_seen",
    ),
    Mutation(
        "layers of a backend share the first layer's weights",
        "AddressTables.of_weights",
        "layout, tuple(map(torch.Tensor.data_ptr, tensors))",
        "(layout,)",
        "tests/unit/test_each_call.py::test_layers_of_a_backend_take_turns",
    ),
    Mutation(
        "a launch goes to the stream of the first one",
        "GroupMemory.open",
        "self._groups.get(stream)",
        "next(iter(self._groups.values()), None)",
        "tests/unit/test_each_call.py::test_another_stream_is_seen",
    ),
    Mutation(
        "a hook that is added after a call is not called",
        "KernelBackend._forward",
        "given.router is not None or self.hooks.are_used",
        "given.router is not None",
        "tests/unit/test_each_call.py::test_a_hook_is_called",
    ),
    Mutation(
        "buffers hold what they held before the bound grew",
        "KernelBackend._bound_now",
        "bound = self.attempts.bound(bound)",
        "bound = bound",
        "tests/unit/test_each_call.py::test_a_change_is_seen",
    ),
    Mutation(
        "threads pack their structs into the same memory",
        "Packed",
        "class Packed(threading.local):",
        "class Packed:",
        "tests/unit/test_operators.py::test_each_thread_packs_a_struct_of_its_own",
    ),
    Mutation(
        "a pass for some parameters adds to all of them",
        "begin",
        "and accumulates(node)",
        "",
        "tests/megatron/test_ddp_hooks.py::test_only_those_that_are_asked_for_get_a_gradient",
    ),
    Mutation(
        "a pass for some parameters counts as one for all",
        "_is_whole_pass",
        "accumulates(_anchor().accumulator)",
        "True",
        "tests/unit/test_autograd.py::test_main_grad_is_for_what_a_backward_accumulates",
    ),
    Mutation(
        "layers with the same experts each have DDP hear of them",
        "of",
        "return one if one.serve(params, fuses=fuses) else None",
        "pass",
        "tests/megatron/test_ddp_hooks.py::test_layers_with_the_same_experts_share_what_ddp_hears",
    ),
    Mutation(
        "weights may be written in place between a forward and its backward",
        "_check_not_changed",
        "_versions_of(weights) - versions",
        "0",
        "tests/megatron/test_ddp_hooks.py::test_weights_that_were_changed_in_place_are_refused",
    ),
    Mutation(
        "gradients that come after their reduction go unnoticed",
        "_check_is_awaited",
        "came >= wanted",
        "False",
        "tests/megatron/test_ddp_gradients.py"
        "::test_recomputed_calls_whose_number_varies_are_an_error",
    ),
    Mutation(
        "gradients that a reduction waits for are not named",
        "check_counts",
        "group.grad_reduce_handle is None and came < wanted",
        "False",
        "tests/megatron/test_ddp_gradients.py"
        "::test_recomputed_calls_whose_number_varies_are_an_error",
    ),
    Mutation(
        "a configuration is not checked again when a layer is built",
        "init",
        "refuse(config, CONFIG_REFUSALS)",
        "pass",
        "tests/megatron/test_layer.py::test_a_configuration_that_was_changed_since_is_refused",
    ),
    Mutation(
        "experts of which some have biases are accepted",
        "_biases",
        "not any(found)",
        "not all(found)",
        "tests/megatron/test_layer.py::test_experts_of_which_some_have_biases_are_refused",
    ),
    Mutation(
        "experts are probed in training mode alone",
        "recognise",
        "itertools.product(PROBE_SCALES, (True, False))",
        "itertools.product(PROBE_SCALES, (True,))",
        "tests/deepspeed/test_experts.py::test_unknown_experts_are_refused",
    ),
    Mutation(
        "sums in float32 do not keep a collective from starting early",
        "may_be_early",
        'not getattr(config, "reduce_scatter_with_fp32_accumulation", False)',
        "True",
        "tests/megatron/test_grad_reduce.py::test_a_gradient_that_came_since_makes_a_bucket_late",
    ),
    Mutation(
        "a CUDA graph without a scope is accepted",
        "graphs_experts",
        "or not parts",
        "",
        "tests/megatron/test_refusals.py::test_newer_settings_are_refused",
    ),
    Mutation(
        "tokens per rank are rounded down",
        "tokens_per_rank",
        "-(-seq_length // shards)",
        "seq_length // shards",
        "tests/megatron/test_refusals.py::test_the_longest_share_of_a_sequence_bounds_the_tokens",
    ),
    Mutation(
        "more rows are expected than the capacity admits",
        "plan_buffer_rows",
        "expected = min(expected, rows)",
        "pass",
        "tests/unit/test_planner.py::test_no_more_rows_are_expected_than_the_capacity_admits",
    ),
    Mutation(
        "forward pre-hooks of others than DDP are left out without a word",
        "_check_hooks",
        "not waits_for_parameters(hook)",
        "False",
        "tests/megatron/test_layer.py::test_changed_experts_are_refused_by_name",
    ),
    Mutation(
        "a scale of an adapter is read once",
        "HeldExperts._read",
        "not isinstance(weights, AdaptedWeights)",
        "True",
        "tests/megatron/test_held_experts.py::test_a_scale_of_an_adapter_is_read_in_every_call",
    ),
    Mutation(
        "experts whose parameters have other names are not read again",
        "HeldExperts._read",
        "names == held_names",
        "True",
        "tests/megatron/test_held_experts.py"
        "::test_experts_that_have_changed_are_read_again[rename_linears]",
    ),
    Mutation(
        "parameters are not awaited where experts are not called",
        "await_parameters",
        "if waits_for_parameters(hook): hook(module)",
        "pass",
        "tests/megatron/test_layer.py::test_parameters_are_awaited_as_often_as_by_a_module",
    ),
    Mutation(
        "float64 probabilities are rounded to the tokens' dtype",
        "run",
        "probs.float()",
        "probs.to(x.dtype)",
        "tests/megatron/test_layer.py"
        "::test_probabilities_in_float64_are_not_rounded_to_the_tokens_dtype",
    ),
    Mutation(
        "launches that warm up count in T(2)",
        "measure",
        "run(WARM_UP) layer.backend.take_records()",
        "run(WARM_UP)",
        "tests/unit/test_calibrate.py::test_launches_that_warm_up_are_not_averaged",
    ),
    Mutation(
        "the table of biases begins with those of fc2",
        "of_weights",
        '("fc1_bias", []) + addresses.get("fc2_bias", [])',
        '("fc2_bias", []) + addresses.get("fc1_bias", [])',
        "tests/unit/test_weights.py::test_the_kernel_finds_each_bias_where_it_looks_for_it",
        on_gpu="tests/gpu/test_variants.py::test_biases[bf16-grad-gated-2]",
    ),
    Mutation(
        "a weight's strides are left out of its table's key",
        "of_weights",
        "first.stride(),",
        "",
        "tests/unit/test_weights.py"
        "::test_the_kernel_refuses_a_view_at_the_address_of_a_weight_that_it_knows",
        on_gpu="tests/gpu/test_bad_input.py"
        "::test_a_view_at_the_address_of_a_known_weight_is_refused",
    ),
    Mutation(
        "a heap is kept that is too small for the next layer",
        "needs",
        "or self.heap_bytes < sizes.heap_bytes",
        "",
        "tests/unit/test_group_memory.py::test_it_never_shrinks",
        on_gpu="tests/gpu/test_launches.py"
        "::test_a_wider_layer_within_the_same_bounds_gets_a_larger_heap",
    ),
    Mutation(
        "a heap that does not fit is allocated all the same",
        "allocate",
        "nbytes > least",
        "False",
        "tests/unit/test_group_memory.py"
        "::test_a_heap_that_does_not_fit_is_refused_before_it_is_allocated",
    ),
    Mutation(
        "a wrapper of a process group passes for its own",
        "torch_group",
        'getattr(group, "__dict__", {}).values()',
        "()",
        "tests/unit/test_wrapped_groups.py::test_which_group_a_wrapper_stands_for",
    ),
    Mutation(
        "layers look for what their group shares by its wrapper",
        "shared_backends",
        "once(GroupBackends, *key, make=make)",
        "once(GroupBackends, object(), *key, make=make)",
        "tests/megatron/test_wrapped_groups.py::test_layers_match_alltoall_over_sleeps",
    ),
    Mutation(
        "a layer that misses many groups keeps the backends of all between",
        "followed",
        "self._last[0], made._last = made, self._last",
        "self._last[0] = made",
        "tests/unit/test_wrapped_groups.py"
        "::test_a_wrapper_has_the_backends_of_one_group_however_often_it_sleeps",
    ),
    Mutation(
        "layers that share a backend part when their group is made again",
        "followed",
        "last is None or _origins[last].is_over",
        "True",
        "tests/unit/test_wrapped_groups.py"
        "::test_layers_are_right_whenever_their_group_is_made_again",
    ),
    Mutation(
        "parameters name a process group that is gone",
        "_mesh_of",
        "mesh._dim_group_names = made._dim_group_names",
        "pass",
        "tests/unit/test_wrapped_groups.py"
        "::test_layers_are_right_whenever_their_group_is_made_again",
    ),
    Mutation(
        "a rank frees memory that a peer has not left",
        "is_left",
        'all(self.has("left", rank) for rank in range(self.num_ranks))',
        'any(self.has("left", rank) for rank in range(self.num_ranks))',
        "tests/unit/test_ending.py::test_no_rank_frees_what_another_one_uses",
    ),
    Mutation(
        "a rank that destroys a group early keeps the memory for good",
        "end_destroyed",
        "elif _left: _free_left()",
        "pass",
        "tests/unit/test_ending.py::test_no_rank_frees_what_another_one_uses",
    ),
    Mutation(
        "a heap outlives its group",
        "free",
        "self._heap, self.heap_bytes, self._workspace_bytes = None, 0, 0",
        "self.heap_bytes, self._workspace_bytes = 0, 0",
        "tests/unit/test_ending.py::test_no_rank_frees_what_another_one_uses",
        on_gpu="tests/gpu/test_ending.py::test_memory_is_free_between_two_groups",
    ),
    Mutation(
        "a heap is freed that a graph of the user's has captured",
        "note_launch",
        "_drop is None",
        "False",
        "tests/unit/test_ending.py::test_graphs_are_dropped_with_their_group",
    ),
    Mutation(
        "Megatron's graph outlives the heap that it has captured",
        "_drop_graphs",
        "graph.reset()",
        "pass",
        "tests/megatron/test_graphs.py"
        "::test_graphs_of_a_group_that_is_destroyed_are_captured_again",
    ),
    Mutation(
        "a process ends with a graph that holds its groups' collectives",
        "patch_full_graph",
        "atexit.register(_drop_at_exit, drop)",
        "pass",
        "tests/megatron/test_graphs.py::test_graphs_are_dropped_at_exit",
    ),
    Mutation(
        "Megatron's graph is captured into the pool of one that is no more",
        "_drop_graphs",
        "setattr(module, _POOL, None)",
        "pass",
        "tests/megatron/test_graphs.py"
        "::test_graphs_of_a_group_that_is_destroyed_are_captured_again",
    ),
    Mutation(
        "groups between hosts outlive the group that they are for",
        "free",
        "destroy_own(self.rail)",
        "pass",
        "tests/unit/test_ending.py::test_groups_between_hosts_end_with_the_whole_one",
    ),
    Mutation(
        "a clamped gate keeps its gradient",
        "activate_backward",
        "gate <= config.clamp_value",
        "gate < math.inf",
        "tests/unit/test_autograd.py::test_gradients_are_the_slopes_of_the_function[gpt-oss]",
    ),
    Mutation(
        "sequential experts are read in blocks of rows",
        "moe_config",
        'hasattr(experts, "local_experts")',
        "experts is None",
        "tests/megatron/test_refusals.py::test_grouped_experts_alone_have_rows_in_blocks",
    ),
    Mutation(
        "columns of probabilities are not sorted with their routes",
        "sort_routes",
        "column_of.reshape(-1)[order]",
        "column_of.reshape(-1)",
        "tests/unit/test_choices.py::test_both_forms_are_equal_bit_by_bit",
    ),
    Mutation(
        "experts that another rank has saved are loaded",
        "_placed_as",
        "part != own",
        "False",
        "tests/unit/test_checkpoints.py::test_a_file_of_another_rank_is_refused",
    ),
    Mutation(
        "loaded experts are on the mesh of the rank that saved them",
        "_placed_as",
        "parameter.device_mesh,",
        "given.device_mesh,",
        "tests/unit/test_checkpoints.py::test_experts_of_a_file_are_on_the_mesh_of_their_layer",
    ),
    Mutation(
        "experts below a parametrization are loaded from any rank's file",
        "_load_from_state_dict",
        "named_parameters()",
        "named_parameters(recurse=False)",
        "tests/unit/test_checkpoints.py::test_parametrized_experts_of_another_rank_are_refused",
    ),
    Mutation(
        "a router with hooks is not called",
        "logits_of",
        "_what_it_adds(router) is None",
        "isinstance(router, nn.Linear)",
        "tests/unit/test_own_router.py::test_a_changed_router_is_called[forward hook]",
    ),
    Mutation(
        "a launch takes a router with a bias",
        "_what_it_adds",
        'if router.bias is not None: return "has a bias"',
        "pass",
        "tests/unit/test_own_router.py::test_a_launch_takes_a_changed_router_for_no_other[bias]",
    ),
    Mutation(
        "hooks on all modules do not see a router",
        "_what_it_adds",
        "_has_any_global_hook()",
        "False",
        "tests/unit/test_own_router.py::test_hooks_on_all_modules_see_the_router",
    ),
    Mutation(
        "a router with a hook computes in bfloat16",
        "logits_of",
        "with _Wide(): logits: torch.Tensor = router(tokens.float())",
        "if True: logits: torch.Tensor = router(tokens)",
        "tests/unit/test_own_router.py::test_looking_at_a_router_changes_no_bits[torch.bfloat16]",
    ),
    Mutation(
        "a router's output is not looked at",
        "logits_of",
        "logits.shape != wanted or not logits.is_floating_point()",
        "False",
        "tests/unit/test_own_router.py::test_what_gives_no_logits_is_refused",
    ),
    Mutation(
        "a call without a result leaves an adapter of the router out",
        "forward",
        "[local_part(one).flatten().float() for one in self.router.parameters()]",
        "[local_part(next(self.router.parameters())).flatten()]",
        "tests/unit/test_own_router.py::test_a_call_without_a_result_spoils_all_of_a_router",
    ),
    Mutation(
        "parameters that others are computed from are drawn without effect",
        "_check_drawable",
        "not isinstance(given, nn.Parameter)",
        "False",
        "tests/unit/test_own_router.py::test_a_reset_draws_nothing_that_is_computed",
    ),
    Mutation(
        "a layer's backend is looked for by fc2 where it is computed",
        "backend",
        "self.fc2",
        'self._parameters["fc2"]',
        "tests/unit/test_layer.py::test_experts_may_be_pruned_or_parametrized",
    ),
    Mutation(
        "a plain parameter of a parametrization is left out of what ranks share",
        "expert_parameters",
        "isinstance(parameter, DTensor) or self.config.num_ranks == 1",
        "True",
        "tests/unit/test_data_parallel.py::test_batches_and_experts_of_other_kinds",
    ),
    Mutation(
        "a wrapped soft gate mixes tokens of all sequences",
        "forward",
        "_within(self.gate, SoftMoEGate) is not None",
        "isinstance(self.gate, SoftMoEGate)",
        "tests/unit/test_gates.py::test_gate_and_layer_may_be_wrapped",
    ),
    Mutation(
        "ranks wait for one that Join has let end",
        "_Reducer.__call__",
        "model is not None and model._join_config.enable",
        "False",
        "tests/unit/test_data_parallel.py::test_batches_and_experts_of_other_kinds",
    ),
    Mutation(
        "a part's rows leave when the part before is computed",
        "_forward",
        "ways = [self._dispatch(send, count, size, of_part(call, i), moment) for i, "
        "(send, count, size, moment) in enumerate("
        "zip(_of_parts(every[:num_routes], sizes), counts, sizes, ready, strict=True))]",
        "ways = (self._dispatch(send, count, size, of_part(call, i), moment) for i, "
        "(send, count, size, moment) in enumerate("
        "zip(_of_parts(every[:num_routes], sizes), counts, sizes, ready, strict=True)))",
        "tests/unit/test_overlap.py::test_parts_travel_while_others_are_computed",
    ),
    Mutation(
        "a part's gradients leave when the part before is computed",
        "_backward",
        "ways = [self._dispatch(self._ordered(packed, tokens), count, size, of_part(call, i)) "
        "for i, (tokens, count, size) in enumerate(zip(token_idx, counts, sizes, strict=True))]",
        "ways = (self._dispatch(self._ordered(packed, tokens), count, size, of_part(call, i)) "
        "for i, (tokens, count, size) in enumerate(zip(token_idx, counts, sizes, strict=True)))",
        "tests/unit/test_overlap.py::test_parts_travel_while_others_are_computed",
    ),
    Mutation(
        "rows are collected once the host knows how many there are",
        "_forward",
        "every, ready = self._ways.collect(tokens, cut.token_idx, degree, self.hooks.order)",
        "heard.wait(); "
        "every, ready = self._ways.collect(tokens, cut.token_idx, degree, self.hooks.order)",
        "tests/unit/test_overlap.py::test_parts_travel_while_others_are_computed",
    ),
    Mutation(
        "parts that come back are copied together",
        "returned",
        "if room is not None",
        "if False",
        "tests/unit/test_overlap.py::test_parts_come_back_to_the_memory_that_is_summed",
    ),
    Mutation(
        "a backward begins that some ranks do not have",
        "backward",
        "if ctx.unfollowed",
        "if False",
        "tests/unit/test_unfollowed.py::test_ranks_without_a_backward_are_named[reference-2-all]",
    ),
    Mutation(
        "ranks without a backward never hear why the others have refused theirs",
        "backward",
        "ctx.backend.put_off(error)",
        "pass",
        "tests/unit/test_unfollowed.py::test_ranks_without_a_backward_are_named[scheduled-2-all]",
    ),
    Mutation(
        "a recorded forward that keeps its inputs alone tells that no backward follows",
        "forward",
        "followed=True,",
        "",
        "tests/unit/test_unfollowed.py"
        "::test_ranks_without_a_backward_are_named[reference-2-inputs]",
    ),
    Mutation(
        "the planner of replicas takes the mark of a rank without a backward for routes",
        "place",
        "without_marks(told)",
        "told",
        "tests/unit/test_unfollowed.py::test_ranks_without_a_backward_are_named[replicas]",
    ),
    Mutation(
        "the device takes the mark of a rank without a backward for rows",
        "plan",
        "received = received % UNFOLLOWED",
        "pass",
        "tests/unit/test_unfollowed.py::test_ranks_without_a_backward_are_named[scheduled-4-all]",
    ),
    Mutation(
        "where all ranks know all counts they take the mark of a rank without a backward for rows",
        "plan",
        "without_marks(Table.of(others[num_received:], config.num_experts))",
        "Table.of(others[num_received:], config.num_experts)",
        "tests/unit/test_unfollowed.py::test_ranks_without_a_backward_are_named[two steps]",
    ),
    Mutation(
        "a refusal by a rank without a backward passes for rows",
        "unfollowed_ranks",
        "> UNFOLLOWED // 2",
        ">= UNFOLLOWED",
        "tests/unit/test_unfollowed.py"
        "::test_a_rank_without_a_backward_hears_and_tells_refusals[scheduled]",
    ),
    Mutation(
        "ranks that share experts get numbers that no rank of the group has",
        "plan",
        "tuple(sorted({source % config.num_ranks for source in sources}))",
        "sources",
        "tests/unit/test_unfollowed.py::test_ranks_that_share_experts_hear_of_each_other",
    ),
    Mutation(
        "ranks of other hosts do not tell that they have no backward",
        "_cross",
        "if given.followed else count + UNFOLLOWED",
        "",
        "tests/unit/test_unfollowed.py::test_ranks_without_a_backward_are_named[hosts]",
    ),
    Mutation(
        "layers that stay in bfloat16 have experts in FP8",
        "_compute",
        "is_kept_in_bf16(layer)",
        "False",
        "tests/megatron/test_fp8.py::test_first_and_last_layers_stay_in_bfloat16",
    ),
    Mutation(
        "one more of the last layers stays in bfloat16",
        "is_kept_in_bf16",
        "<= number < end",
        "<= number < end - 1",
        "tests/megatron/test_fp8.py::test_first_and_last_layers_stay_in_bfloat16",
    ),
    Mutation(
        "a block in FP8 is read with the scale of the next one",
        "dequantize",
        "blocks.scales.unsqueeze",
        "blocks.scales.roll(1, -1).unsqueeze",
        "tests/unit/test_blockwise.py::test_each_block_has_its_own_scale",
    ),
    Mutation(
        "rows in FP8 are read with the scales of the row above",
        "dequantize",
        "blocks.scales.unsqueeze",
        "blocks.scales.roll(1, -2).unsqueeze",
        "tests/unit/test_fp8.py::test_results_are_those_of_rounded_operands",
    ),
    Mutation(
        "gate and up projections in FP8 are read with each other's scales",
        "Blockwise.weights",
        "dequantize(each, one.dtype)",
        "dequantize(each._replace(scales=each.scales.roll(each.scales.shape[-2] // 2, -2)), "
        "one.dtype)",
        "tests/unit/test_fp8.py::test_results_are_those_of_rounded_operands",
    ),
    Mutation(
        "the largest value of a block in FP8 is sought in half of it",
        "quantize",
        "nan_to_num(0.0, posinf=torch.inf)",
        "nan_to_num(0.0, posinf=torch.inf)[..., :64]",
        "tests/unit/test_blockwise.py::test_every_bfloat16_as_the_largest_of_a_block",
    ),
    Mutation(
        "scales of FP8 are no powers of two",
        "_scale_of",
        "& _EXPONENT",
        "& -1",
        "tests/unit/test_blockwise.py::test_blocks_by_hand",
    ),
    Mutation(
        "a number over all largest values is multiplied with reciprocals",
        "_scale_of",
        "amax.new_full((), LARGEST) / amax",
        "LARGEST / amax",
        "tests/unit/test_blockwise.py::test_every_bfloat16_as_the_largest_of_a_block",
    ),
    Mutation(
        "activations are quantized before they are rounded to bfloat16",
        "Steps.weighted_activation",
        "(activate(preact.to(wide), config) * row_probs.to(wide)[:, None]).to(preact.dtype)",
        "activate(preact.to(wide), config) * row_probs.to(wide)[:, None]",
        "tests/unit/test_fp8.py::test_activations_are_rounded_to_bfloat16_and_then_to_fp8",
    ),
    Mutation(
        "weights are quantized once for a layer",
        "Blockwise.weights",
        "return replace(weights, fc1=fc1, fc2=fc2, promise=None)",
        'return self.__dict__.setdefault("kept", replace(weights, fc1=fc1, fc2=fc2))',
        "tests/unit/test_fp8.py::test_no_quantized_weight_is_older_than_its_parameter",
    ),
    Mutation(
        "weights are quantized again only where a counter of versions has changed",
        "Blockwise.weights",
        "return replace(weights, fc1=fc1, fc2=fc2, promise=None)",
        "return self.__dict__.setdefault("
        "str([(one.data_ptr(), one._version) for one in weights.fc1]), "
        "replace(weights, fc1=fc1, fc2=fc2))",
        "tests/unit/test_fp8.py::test_no_quantized_weight_is_older_than_its_parameter",
    ),
    Mutation(
        "a promise that is given again finds copies of before",
        "Promise.give",
        "self._made_of.clear()",
        "pass",
        "tests/unit/test_promise.py::test_the_first_pass_makes_what_others_find",
    ),
    Mutation(
        "a promise holds behind its end",
        "Promise.end",
        "self._is_given = False ... clear()",
        "pass",
        "tests/unit/test_promise.py::test_a_broken_promise_is_not_noticed",
    ),
    Mutation(
        "copies of weights that were written in place are current",
        "Promise.making",
        "sum(map(_version_of, tensors))",
        "0",
        "tests/unit/test_promise.py::test_what_a_layer_sees_goes_before_the_word",
    ),
    Mutation(
        "copies of a graph's capture are current outside of it",
        "Promise.making",
        " or self._is_captured != _is_capturing()",
        "",
        "tests/unit/test_promise.py::test_a_graph_replays_what_its_capture_saw",
    ),
    Mutation(
        "what is cast for a call has the layer's promise",
        "FlashMoELayer._weights",
        "promise = None",
        "pass",
        "tests/unit/test_promise.py::test_what_is_computed_for_a_call_is_copied_in_each",
    ),
    Mutation(
        "a launch that fails has made copies",
        "own_copies",
        "making.keep(copies)",
        "making.keep(copies); making.note()",
        "tests/unit/test_promise.py::test_launches_of_the_kernel",
    ),
    Mutation(
        "a backward in FP8 multiplies a forward's copies of weights for its transposes",
        "KernelBackend._making",
        "weights.making(TRANSPOSES)",
        "weights.making(COPIES)",
        "tests/unit/test_promise.py::test_launches_of_the_kernel",
        "tests/gpu/test_fp8_kernel.py::test_weights_quantized_once_a_step_change_no_bit",
    ),
    Mutation(
        "a backward in bfloat16 keeps the copies that it reads",
        "KernelBackend._making",
        "if self.config.has_fp8_dgrad",
        "if self.config.in_fp8",
        "tests/unit/test_promise.py::test_launches_of_the_kernel",
        "tests/gpu/test_fp8_kernel.py::test_weights_quantized_once_a_step_change_no_bit",
    ),
    Mutation(
        "transposes of weights have the room of a forward's copies",
        "KernelBackend._use_weights",
        "weight_copy_bytes[is_backward]",
        "weight_copy_bytes[False]",
        "tests/unit/test_promise.py::test_launches_of_the_kernel",
    ),
    Mutation(
        "layers that keep transposes of weights share them",
        "KernelBackend._backward",
        "self._use_weights(weights, making, is_backward=True)",
        "self._use_weights(weights)",
        "tests/unit/test_promise.py::test_launches_of_the_kernel",
        "tests/gpu/test_fp8_kernel.py::test_layers_that_take_turns_keep_transposes_of_their_own",
    ),
    Mutation(
        "copies of any weights are current while a promise holds",
        "Making.is_current",
        "self.promise._made_of.get(self.maker) == self.of",
        "self.maker in self.promise._made_of",
        "tests/unit/test_promise.py::"
        "test_a_change_between_two_backwards_has_both_directions_quantize_again",
        "tests/gpu/test_fp8_kernel.py::test_a_broken_promise_is_not_noticed",
    ),
    Mutation(
        "copies of one direction are current as soon as the other's are",
        "Making.note",
        "self.promise._made_of[self.maker] = self.of",
        "self.promise._made_of.update(dict.fromkeys((*self.promise._made, self.maker), self.of))",
        "tests/unit/test_promise.py::test_makers_have_copies_of_their_own",
    ),
    Mutation(
        "experts of few columns have slow gradients of tokens in FP8 without a word",
        "warn_of_slow_gradients",
        "config.hidden < LEAST_HIDDEN_OF_FP8_DGRAD",
        "config.hidden < 128",
        "tests/unit/test_select.py::test_slow_gradients_of_tokens_in_fp8_are_told_of",
    ),
    Mutation(
        "a promise outlives its schedule or loop",
        "promised",
        "promise.end()",
        "pass",
        "tests/megatron/test_unchanged.py::test_a_promise_ends_with_the_schedule",
    ),
    Mutation(
        "a promise in DeepSpeed outlives its batch",
        "Batches.__call__",
        "elif micro_batch == 0:",
        "elif self._batch is None:",
        "tests/deepspeed/test_unchanged.py::test_a_training_has_the_same_bits",
    ),
    Mutation(
        "a backward of experts in FP8 takes weights that are not rounded",
        "BackwardParts.__init__",
        "self._precision.weights(weights)",
        "weights",
        "tests/unit/test_fp8.py::test_results_are_those_of_rounded_operands",
    ),
    Mutation(
        "the second projection's gradient takes activations that are not in FP8",
        "BackwardParts.keep",
        "self._precision.between(found.weighted)",
        "found.weighted",
        "tests/unit/test_fp8.py::test_results_are_those_of_rounded_operands",
    ),
    Mutation(
        "gradients of tokens take gradients of pre-activations that are not in FP8",
        "BackwardParts.compute",
        "self._of_gradients.between(of_preact)",
        "of_preact",
        "tests/unit/test_fp8.py::test_gradients_are_quantized_as_tokens_are",
    ),
    Mutation(
        "gradients of pre-activations are quantized before they are rounded to bfloat16",
        "Steps.weighted_activation_backward",
        "return grad_preact.to(preact.dtype)",
        "return grad_preact",
        "tests/unit/test_fp8.py::test_gradients_are_quantized_as_tokens_are",
    ),
    Mutation(
        "backwards quantize gradients although forwards alone are in FP8",
        "precision_of_gradients",
        "config.has_fp8_dgrad",
        "config.in_fp8",
        "tests/unit/test_fp8.py::test_results_are_those_of_rounded_operands",
    ),
    Mutation(
        "the kernel's hooks are shown the bytes of rows in FP8",
        "KernelBackend._show_rows",
        "self.config.in_fp8",
        "False",
        "tests/unit/test_capacity_hooks.py::test_the_kernels_rows_in_fp8_are_shown_as_numbers",
    ),
    Mutation(
        "factors are given the bytes of rows in FP8",
        "BackwardRows._inputs",
        "found.x is not None",
        "False",
        "tests/unit/test_backward_rows.py::test_factors_take_them",
    ),
    Mutation(
        "rows in FP8 count as rows of 16 bits",
        "KernelBackend.traffic",
        "in_fp8 * fp8_row_bytes(hidden)",
        "in_fp8 * hidden * 2",
        "tests/unit/test_traffic.py::test_rows_in_fp8_count_with_their_scales",
    ),
    Mutation(
        "layers of frameworks compute in bfloat16 where FP8 is asked for",
        "GroupBackends.backend_of",
        "experts or self._settings.experts",
        'experts or "bf16"',
        "tests/unit/test_fp8.py::test_layers_of_frameworks_get_what_their_option_says",
    ),
    Mutation(
        "metrics count dispatched tokens in FP8 as bfloat16",
        "LayerPlace.pulled_bytes",
        "self.config.dispatched_bytes(self.element_bytes, is_backward=is_backward)",
        "self.row_bytes",
        "tests/unit/test_fp8.py::test_metrics_count_the_bytes_that_travel",
    ),
    Mutation(
        "Megatron's runs in another recipe may have experts in blockwise FP8",
        "check_fp8_experts",
        'in_fp8 and recipe != "blockwise"',
        "False",
        "tests/megatron/test_fp8.py::test_what_experts_in_fp8_would_not_follow",
    ),
    Mutation(
        "Megatron's runs with gradients in E5M2 may have some in E4M3",
        "check_fp8_experts",
        'getattr(config, "fp8", None) == "hybrid"',
        "False",
        "tests/megatron/test_fp8.py::test_a_run_in_blockwise_fp8_may_have_such_experts",
    ),
    Mutation(
        "the kernel takes gate and up rows in blocks that FP8 does not have",
        "check_kernel_experts",
        "config.glu_interleave % FP8_GRANULE",
        "config.glu_interleave < 0",
        "tests/unit/test_fp8.py::test_the_kernel_refuses_blocks_of_gate_and_up_rows_by_name",
    ),
    Mutation(
        "each layer on the kernel has copies of weights in FP8 of its own",
        "AddressTables._copies_of_a_layer",
        "self._copies = copies",
        "pass",
        "tests/unit/test_tables.py::test_layers_in_fp8_share_the_copies_of_their_weights",
    ),
)


def place_of(mutation: Mutation, sources: Sources) -> Place:
    """Finds the piece of code that a mutation changes.

    Raises:
        ValueError: It is not in the package exactly once; says in which files it is.
    """
    found = sources.find(mutation.where, mutation.old)
    if len(found) != 1:
        listed = ", ".join(str(place.file) for place in found) or "nowhere"
        raise ValueError(
            f"{mutation.name}: in {mutation.where} wanted once, found {listed}:\n{mutation.old}"
        )
    return found[0]


def mutated(mutation: Mutation, sources: Sources) -> tuple[Path, str]:
    """Returns the file that a mutation changes, and what is in it then."""
    place = place_of(mutation, sources)
    text = sources.texts[place.file]
    return place.file, text[: place.begin] + mutation.new + text[place.end :]


def _copy(directory: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__", "corpus", "results")
    for name in NEEDED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, directory / name, ignore=ignored)
        else:
            shutil.copy(source, directory / name)


def _pytest(directory: Path, tests: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(directory), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


PASSED, FAILED = 0, 1
"""Exit statuses of pytest; others mean that it could not run the tests."""


def judge(
    mutation: Mutation, directory: Path, sources: Sources, *, on_gpu: bool
) -> tuple[str, str]:
    """Applies a mutation to a copy of the tree, runs its tests and takes it back.

    Args:
        mutation: The change.
        directory: The copy.
        sources: Its package.
        on_gpu: Whether to run the test that wants a GPU in place of the other.

    Returns:
        "caught", "missed" or "broken", and pytest's output.
    """
    file, text = mutated(mutation, sources)
    file.write_text(text)
    try:
        done = _pytest(directory, [mutation.on_gpu if on_gpu else mutation.caught_by])
    finally:
        file.write_text(sources.texts[file])
    is_skipped = " passed" not in done.stdout and " skipped" in done.stdout
    outcome = {FAILED: "caught", PASSED: "missed"}.get(done.returncode, "broken")
    if " failed in " in done.stdout:  # also if ranks that hang have then aborted the process
        outcome = "caught"
    return "broken" if outcome == "missed" and is_skipped else outcome, done.stdout + done.stderr


def main(arguments: list[str]) -> int:
    """Runs from the command line; fails if a mutation is missed."""
    parser = argparse.ArgumentParser("tests.mutations", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("words", nargs="*", help="only mutations whose name contains one of them")
    parser.add_argument("--list", action="store_true", help="print the list and end")
    parser.add_argument("--gpu", action="store_true", help="run the tests that want a GPU instead")
    options = parser.parse_args(arguments)
    words = options.words or [""]
    chosen = [one for one in MUTATIONS if any(word in one.name for word in words)]
    if options.gpu:
        chosen = [one for one in chosen if one.on_gpu]
    if not chosen:
        parser.error(f"no mutation has {' or '.join(words)!r} in its name: see --list")
    if options.list:
        sources = Sources(ROOT / PACKAGE)
        for one in chosen:
            place = place_of(one, sources).file.relative_to(ROOT)
            sys.stdout.write(f"| {one.name} | `{place}` | `{one.caught_by}` |\n")
        return 0
    outcomes = []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        _copy(directory)
        sources = Sources(directory / PACKAGE)
        tests = sorted({one.on_gpu if options.gpu else one.caught_by for one in chosen})
        sys.stdout.write(f"{len(tests)} tests on the package as it is ... ")
        sys.stdout.flush()
        unchanged = _pytest(directory, tests)
        if unchanged.returncode != PASSED:
            sys.stdout.write(f"failed:\n{unchanged.stdout[-4000:]}{unchanged.stderr[-2000:]}\n")
            return 1
        sys.stdout.write("passed\n")
        for one in chosen:
            begin = time.monotonic()
            outcome, said = judge(one, directory, sources, on_gpu=options.gpu)
            outcomes.append(outcome)
            sys.stdout.write(f"{outcome} in {time.monotonic() - begin:.0f} s: {one.name}\n")
            if outcome == "broken":
                sys.stdout.write(f"{said[-4000:]}\n")
            sys.stdout.flush()
    sys.stdout.write(f"{outcomes.count('caught')} of {len(outcomes)} caught\n")
    return 0 if set(outcomes) <= {"caught"} else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
