"""Changes of one line that would be defects, and the test that catches each.

As a program it applies them one after the other to a copy of the working tree, runs the test named
for each and says whether it failed, as it must::

    python -m tests.mutations                # all that this machine can show, some six minutes
    python -m tests.mutations heap           # those whose name contains a word
    python -m tests.mutations --list         # the list as a table

A mutation is two texts. Its line is searched for in the whole package, so it may move between
files; ``unit/test_mutations.py`` holds that each is there exactly once and that its test exists.
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
        old: A text that is in the package exactly once.
        new: What it becomes.
        caught_by: The test that fails then, as pytest names it.
        on_gpu: A further test that fails on a GPU, or nothing.
    """

    name: str
    old: str
    new: str
    caught_by: str
    on_gpu: str = ""


MUTATIONS = (
    Mutation(
        "an expert of another rank of transformers is taken for the first here",
        "top_k_index.masked_fill(is_elsewhere, -1)",
        "top_k_index.masked_fill(is_elsewhere, 0)",
        "tests/frameworks/test_transformers.py::test_a_module_keeps_no_trace",
    ),
    Mutation(
        "transposed experts of transformers are as wide as their rows are many",
        "rows, hidden = hidden, rows",
        "pass",
        "tests/frameworks/test_transformers.py::test_rows_are_found_where_a_class_has_them",
    ),
    Mutation(
        "alternating gate and up rows of transformers are read as halves",
        '"glu_interleave": int(gated and not experts.is_concatenated)}',
        '"glu_interleave": 0}',
        "tests/frameworks/test_transformers.py::test_rows_are_found_where_a_class_has_them",
    ),
    Mutation(
        "outputs under autocast have its dtype and not the tokens'",
        "return out.to(hidden_states.dtype)",
        "return out",
        "tests/frameworks/test_transformers.py::test_autocast_gives_back_the_dtype_of_the_tokens",
    ),
    Mutation(
        "buckets of DeepSpeed have as many elements as fit bytes",
        "max(plan.piece_bytes // size, 1)",
        "max(plan.piece_bytes, 1)",
        "tests/deepspeed/test_training.py::test_buckets_have_the_size_of_what_fits_gaps",
    ),
    Mutation(
        "every call with a map is refused",
        "if routing_map.dtype != torch.bool:\n            raise ShapeError",
        "if routing_map.dtype is not None:\n            raise ShapeError",
        "tests/fuzz/test_public_api.py::test_moe_apply",
    ),
    Mutation(
        "the router's factor scales no probability",
        "return probs * self.scaling_factor",
        "return probs",
        "tests/fuzz/test_public_api.py::test_moe_router_forward",
    ),
    Mutation(
        "over hosts nothing is offloaded",
        "each = kept if isinstance(kept, list) else [kept]",
        "each = [kept]",
        "tests/megatron/test_offload.py::test_what_is_offloaded_gives_the_same_training",
    ),
    Mutation(
        "a lookahead predicts from logits without their sigmoid",
        "logits = logits.sigmoid() + router.expert_bias",
        "logits = logits + router.expert_bias",
        "tests/megatron/test_replicas.py::test_a_lookahead_adds_the_bias_of_experts_to_sigmoids",
    ),
    Mutation(
        "products are taken to be half as large",
        "calls = {2.0 * weights.numel() * rows:",
        "calls = {1.0 * weights.numel() * rows:",
        "tests/unit/test_schedule_fit.py::test_ranks_measure_and_choose_degrees",
    ),
    Mutation(
        "XMoE's auxiliary loss is that of its sigmoids",
        "_balance(softmax, topk_idx)",
        "_balance(scores, topk_idx)",
        "tests/unit/test_gates.py::test_xmoe_is_its_loop",
    ),
    Mutation(
        "shares are rounded after every host",
        "wide = torch.float64 if like.dtype == torch.float64 else torch.float32\n    if ordered",
        "wide = like.dtype\n    if ordered",
        "tests/unit/test_hosts.py::test_shares_of_hosts_are_rounded_once",
    ),
    Mutation(
        "weights of NaN beside indices are not refused over hosts",
        "            is_bad |= (weights.isnan() & (experts >= 0)).any(1)\n",
        "",
        "tests/unit/test_hosts.py::test_a_refusal_of_one_rank_ends_the_call_on_all_hosts",
    ),
    Mutation(
        "what stays on a host counts as crossed",
        "leaving = sum(send_counts) - send_counts[self.grid.host]",
        "leaving = sum(send_counts)",
        "tests/unit/test_hosts.py::test_a_token_crosses_once_to_each_host",
    ),
    Mutation(
        "results pushed over hosts are told as rows pulled",
        "results_pushed=placed(record.results_pushed),",
        "results_pushed=placed(record.rows_pulled),",
        "tests/unit/test_hosts.py::test_records_have_ranks_at_their_places_in_the_group",
    ),
    Mutation(
        "a backend over hosts that grows forgets what it has sent",
        "rows_sent=sum(part.rows_sent for part in parts)",
        "rows_sent=parts[-1].rows_sent",
        "tests/unit/test_hosts.py::test_a_backend_that_has_grown_counts_what_it_sent_before",
    ),
    Mutation(
        "the calibration is asked of a rank of another group",
        "owner = dist.get_global_rank(group, has_one.index(True))",
        "owner = has_one.index(True)",
        "tests/unit/test_telemetry_reports.py::test_a_group_of_some_ranks_agrees_on_its_own_calibration",
    ),
    Mutation(
        "an error of one rank's system leaves the others waiting",
        "except (FlashMoEError, OSError, RuntimeError) as error:",
        "except FlashMoEError as error:",
        "tests/unit/test_multipath.py::test_what_one_rank_cannot_make_no_rank_waits_for",
    ),
    Mutation(
        "the last reason of a failure takes the place of the first",
        "    if notice(memory) is None:\n        text",
        "    if True:\n        text",
        "tests/unit/test_multipath.py::test_the_first_reason_of_a_failure_stays",
    ),
    Mutation(
        "counters end at their last number",
        "return (int(word.value) - count) & 0xFFFFFFFF < 2**31",
        "return int(word.value) >= count",
        "tests/unit/test_rings.py::test_a_counter_goes_on_past_its_last_number",
    ),
    Mutation(
        "strided tensors at a known address are not refused",
        "if known is not None and output.is_contiguous() and input.is_contiguous():",
        "if known is not None:",
        "tests/unit/test_rings.py::test_a_known_address_does_not_make_a_tensor_contiguous",
    ),
    Mutation(
        "ranks decide apart whether links are faster",
        "by_links, by_plain = greatest(self._control.gather(own))",
        "by_links, by_plain = own",
        "tests/unit/test_trials.py::test_links_have_to_win_by_a_margin_on_the_slowest_rank",
    ),
    Mutation(
        "experts are never reduced again after a backward that failed",
        "            self._is_queued = False  # also where a backward before has failed\n",
        "",
        "tests/unit/test_data_parallel.py::test_experts_are_reduced_behind_a_backward_that_has_failed",
    ),
    Mutation(
        "a rank gets more blocks than with every expert at home",
        "            or max(blocks_left, blocks_there) > self.most_blocks\n",
        "",
        "tests/replicas/test_balance.py::test_fewer_rows_are_not_bought_with_more_blocks",
    ),
    Mutation(
        "an unused gap is added to later ones",
        "            self._room = 0.0  # a gap is over with its layer",
        "            pass",
        "tests/unit/test_gradient_slices.py::test_a_gap_without_pieces_leaves_no_room_to_later_ones",
    ),
    Mutation(
        "a bound leaves out rows of ranks that share experts",
        "if all_counts is None or self._tensor is not None:",
        "if all_counts is None:",
        "tests/unit/test_scheduled.py::test_rows_of_all_ranks_that_share_experts_count_in_the_bound",
    ),
    Mutation(
        "a hook that comes after a call is not looked at",
        "        hooks[handle.id] = hook\n        self._probed.clear()\n",
        "        hooks[handle.id] = hook\n",
        "tests/unit/test_hooks.py::test_hooks_that_change_shapes_are_refused_on_every_rank_before_rows_are_sent",
    ),
    Mutation(
        "every rank's locality is that of rank 0",
        "routes=(sent[self._rank], sum(sent)),",
        "routes=(sent[0], sum(sent)),",
        "tests/unit/test_scheduled.py::test_ranks_are_the_reference_and_hosts_change_no_bit",
    ),
    Mutation(
        "a view's gradient takes other memory than its base's",
        "            buffer._base is None\n            and buffer",
        "            buffer",
        "tests/unit/test_scheduled.py::test_a_gradient_that_is_a_view_is_written_where_it_is",
    ),
    Mutation(
        "one rank takes a fit that several would refuse",
        "read_fit(path, None, dtype)  # what several",
        "pass  # what several",
        "tests/unit/test_schedule_fit.py::test_one_rank_wants_the_fit_that_several_want",
    ),
    Mutation(
        "slots on one rank do nothing without a word",
        'config.num_ranks == 1 and chosen != "scheduled":',
        'config.num_ranks == 0 and chosen != "scheduled":',
        "tests/unit/test_select.py::test_slots_on_one_rank_are_said_to_do_nothing",
    ),
    Mutation(
        "the memory of slots is looked at on several ranks alone",
        "if self.options.filled_slots:  # on one rank, too",
        "if self.spare_slots:  # on one rank, too",
        "tests/unit/test_group_memory.py"
        "::test_slots_that_take_too_much_memory_are_refused_on_one_rank_too",
    ),
    Mutation(
        "replicas are described that one rank does not have",
        "if settings.filled_slots and backend.config.num_ranks > 1:",
        "if settings.filled_slots:",
        "tests/megatron/test_ignored.py::test_replicas_are_described_where_there_are_other_ranks",
    ),
    Mutation(
        "an unknown option is compared with names that are nothing like it",
        "difflib.get_close_matches(str(name), names, n=1)",
        "difflib.get_close_matches(str(name), names, n=1, cutoff=0.0)",
        "tests/unit/test_options.py::test_an_unknown_option_that_is_like_none_gets_all_names",
    ),
    Mutation(
        "a token of NaN is told as its router's weight",
        "problem = choices_problem(backend.config, topk_idx, topk_weight, x)",
        "problem = choices_problem(backend.config, topk_idx, topk_weight)",
        "tests/unit/test_gates.py::test_every_rank_hears_of_the_token_of_nan",
    ),
    Mutation(
        "selective checkpointing keeps tensors that a backend writes into",
        "return _disable_current_modes() if _num_modes() else _NOTHING",
        "return _NOTHING",
        "tests/unit/test_reference_backend.py::test_what_a_checkpoint_saves_of_a_forward_changes_no_gradient",
    ),
    Mutation(
        "experts of transformers keep what they computed in their first call",
        "if is_alone and self._held is not None and self._held.change(look()) is not None:",
        "if False:",
        "tests/frameworks/test_changed_experts.py::test_a_change_is_computed_whenever_it_comes",
    ),
    Mutation(
        "experts that were pruned or widened keep the sizes that they had",
        "key = device, topk, dtype, (sizes if num_ranks == 1 else group)",
        "key = device, topk, dtype, group",
        "tests/frameworks/test_changed_experts.py::test_a_change_is_computed_whenever_it_comes[wider]",
    ),
    Mutation(
        "a gate that is replaced on a class is ignored",
        'others: list[object] = [getattr(type(experts), "_apply_gate", None)]',
        "others: list[object] = [None]",
        "tests/frameworks/test_changed_experts.py::test_a_change_is_computed_whenever_it_comes",
    ),
    Mutation(
        "an attribute of a function that experts hold is ignored",
        "elif self._is_whole and callable(value) and type(_vars(value)) is dict:",
        "elif False:",
        "tests/frameworks/test_changed_experts.py::test_a_change_is_refused_whenever_it_comes",
    ),
    Mutation(
        "hooks on the experts' activation are not called, and nobody says so",
        "for module in find_touched(below):",
        "for module in find_touched([]):",
        "tests/frameworks/test_changed_experts.py::test_a_change_is_refused_whenever_it_comes",
    ),
    Mutation(
        "experts are read again after each step of ZeRO-3",
        "and not name.startswith(_ENGINES_PREFIXES)",
        "",
        "tests/frameworks/test_changed_experts.py::test_experts_are_read_once_where_nothing_says_what_they_compute",
    ),
    Mutation(
        "experts are read again after each step of pruned parameters",
        "and not name.startswith(self._prefixes)",
        "and name not in self._ignored",
        "tests/frameworks/test_changed_experts.py::test_experts_are_read_once_where_nothing_says_what_they_compute",
    ),
    Mutation(
        "modules are kept alive by what they hold",
        "        return weakref.ref(value)\n",
        "        return lambda: value\n",
        "tests/frameworks/test_changed_experts.py::test_experts_are_given_up_with_their_module",
    ),
    Mutation(
        "hooks on all modules see the rows of the proof",
        "    for registry in _HOOKS_OF_ALL:\n        registry.clear()",
        "    for registry in ():\n        registry.clear()",
        "tests/frameworks/test_changed_experts.py::test_nobody_sees_the_rows_of_the_proof",
    ),
    Mutation(
        "function modes see the rows of the proof",
        "            torch._C.DisableTorchFunction(),\n",
        "",
        "tests/frameworks/test_changed_experts.py::test_nobody_sees_the_rows_of_the_proof",
    ),
    Mutation(
        "a function is proved in one of the experts' modes alone",
        "for mode in (True, False)]",
        "for mode in (False, False)]",
        "tests/frameworks/test_changed_experts.py::test_a_change_is_refused_whenever_it_comes",
    ),
    Mutation(
        "a rank that refuses its experts leaves the others waiting",
        "shapes = from_all(lambda: (look(), read_shape())[1], group)",
        "shapes = [(look(), read_shape())[1]]",
        "tests/frameworks/test_changed_experts.py::test_ranks_that_differ_are_told_of_it_on_all",
    ),
    Mutation(
        "experts of one rank that change are computed as they were",
        "                known.check_unchanged(seat, look, read)\n",
        "",
        "tests/frameworks/test_changed_experts.py::test_ranks_that_differ_are_told_of_it_on_all",
    ),
    Mutation(
        "tokens of another dtype than the experts' are refused",
        "out = seat(hidden_states.to(dtype), top_k_index",
        "out = seat(hidden_states, top_k_index",
        "tests/frameworks/test_changed_experts.py::test_tokens_of_another_dtype_are_computed_in_the_experts",
    ),
    Mutation(
        "transposed parameters of experts are refused",
        "return (weight if weight.stride(-1) == 1 else weight.contiguous(),)",
        "return (weight,)",
        "tests/frameworks/test_changed_experts.py::test_transposed_parameters_are_computed",
    ),
    Mutation(
        "DeepSpeed's experts keep the function that they had when flashmoe was attached",
        "    change = watched.held.change(holding)\n",
        "    change = None\n",
        "tests/deepspeed/test_forwards.py::test_what_modules_hold_is_noticed_later",
    ),
    Mutation(
        "a change that matters to one rank of DeepSpeed's is taken for one that does not",
        "lambda: _read_form(self)[0] == self.form",
        "lambda: True",
        "tests/deepspeed/test_attach.py::test_what_experts_hold_later_on_one_rank_ends_the_call_on_every_rank",
    ),
    Mutation(
        "ranks of DeepSpeed may compute different functions",
        "report[name] = _difference(name, [its_facts for *_, its_facts in everyone]) or FUSED",
        "report[name] = FUSED",
        "tests/deepspeed/test_attach.py::test_refusal_and_fallback",
    ),
    Mutation(
        "an average of two ranks overflows where their sum would",
        "is_one = len(contributions) == 2 and not average",
        "is_one = len(contributions) == 2",
        "tests/unit/test_multipath.py::test_sums_are_rounded_once_and_in_rank_order",
    ),
    Mutation(
        "ranks note other transfers where only some have their own part to copy",
        "times.is_next_timed()\n        if",
        "times.is_next_timed() or meanwhile is not None\n        if",
        "tests/unit/test_rings.py::test_ranks_take_note_of_the_same_transfers",
    ),
    Mutation(
        "every gather by two links is timed, which holds a GPU up",
        "return timed_event(stream) if is_timed else stream.record_event()",
        "return timed_event(stream)",
        "tests/unit/test_rings.py::test_a_gather_by_two_links_is_timed_one_time_in_eight",
    ),
    Mutation(
        "a gather does not wait for the relay's part",
        "            self.link.await_end(self._stream, self._end_number)\n",
        "            pass\n",
        "tests/unit/test_rings.py::test_gathers_without_a_detour_have_shares_of_their_own",
    ),
    Mutation(
        "a link goes on whose partner has failed",
        "            for partner in self.partners:\n                partner.fail(error)\n",
        "",
        "tests/unit/test_rings.py::test_links_fail_together",
    ),
    Mutation(
        "times of a transfer move shares by which it has not gone",
        "if shares != known.shares:",
        "if False:",
        "tests/unit/test_trials.py::test_ranks_have_the_same_shares_when_a_link_comes_back",
    ),
    Mutation(
        "a slot for all is filled while one of its receivers still copies out of it",
        "for ring in rings:\n            ring.await_slot()",
        "rings[0].await_slot()",
        "tests/unit/test_rings.py::test_what_is_for_all_is_sent_once",
    ),
    Mutation(
        "the watch takes a copy that has only been offered for one that has arrived",
        "return self._link.has_arrived(self._count)",
        "return self.has_begun()",
        "tests/unit/test_rings.py::test_a_peer_that_stays_away_is_named",
    ),
    Mutation(
        "a stream behind direct copies waits for offers in place of arrivals",
        "_Mark(self, board.OFFERED), _Mark(self, board.WRITTEN)",
        "_Mark(self, board.OFFERED), _Mark(self, board.OFFERED)",
        "tests/unit/test_rings.py::test_copies_beside_each_other_wait_for_the_first_stream_and_it_for_them",
    ),
    Mutation(
        "a stream with direct copies waits for its own offer in place of its peers'",
        "theirs = [link.headers[peer] + offset for peer in link.peers]",
        "theirs = [link.headers[link.rank] + offset for _ in link.peers]",
        "tests/unit/test_rings.py::test_copies_beside_each_other_wait_for_the_first_stream_and_it_for_them",
    ),
    Mutation(
        "what was broken off while it was issued is not let go",
        "if self._link.broken is not None:  # what was broken off",
        "if False:  # what was broken off",
        "tests/unit/test_rings.py::test_closing_lets_go_of_late_peers",
    ),
    Mutation(
        "memory that one rank cannot share is asked for in every call",
        "if self._can_share and key not in self._shared:",
        "if key not in self._shared:",
        "tests/unit/test_rings.py::test_tensors_that_are_shared_are_written_to",
    ),
    Mutation(
        "a slice of gradients does not wait until these are complete",
        "_Piece(num_bytes, start, lanes.mark(self._device))",
        "_Piece(num_bytes, start, None)",
        "tests/unit/test_gradient_slices.py::"
        "test_pieces_start_in_order_where_they_fit_once_they_are_complete",
    ),
    Mutation(
        "keep is left out of what ranks agree on",
        '_ALWAYS = (\n    "keep",\n',
        "_ALWAYS = (\n",
        "tests/unit/test_select.py::test_ranks_must_agree_on_what_is_kept",
    ),
    Mutation(
        "a wait for rows counts as exposed while processors compute",
        "min(phases[Phase.ROWS_WAIT], idle)",
        "phases[Phase.ROWS_WAIT]",
        "tests/unit/test_telemetry.py"
        "::test_a_wait_for_rows_is_exposed_no_longer_than_the_processors_are_idle",
    ),
    Mutation(
        "a host that knows of a fault launches as if it did not",
        "if self._can_share and self.memory.has_shared_fault:\n            raise",
        "if False:\n            raise",
        "tests/unit/test_in_step.py::test_hosts_that_wait_raise_in_the_next_call",
        on_gpu="tests/gpu/test_in_step.py::test_all_raise_in_one_call",
    ),
    Mutation(
        "a rank that refuses a call takes no part in its backward",
        "            self.backward(none, saved.saved, weights, *kinds)\n",
        "",
        "tests/unit/test_in_step.py::test_all_raise_in_one_call",
        on_gpu="tests/gpu/test_in_step.py::test_all_raise_in_one_call",
    ),
    Mutation(
        "a backward that is refused is not told to the other ranks",
        "        self.put_off(error)\n        for grad",
        "        for grad",
        "tests/unit/test_in_step.py::test_a_backward_that_is_refused",
    ),
    Mutation(
        "hooks of experts go on serving where one of them has been frozen",
        "            and list(map(_wants_grad, params)) == self._is_trained\n",
        "",
        "tests/megatron/test_ddp_hooks.py::test_a_frozen_expert_has_no_gradient_and_ddp_hears_of_the_others",
    ),
    Mutation(
        "fixed sizes have too little room at first: the first call makes a second backend",
        "first = every if self._is_fixed else tokens_within(config, grid.num_hosts)",
        "first = tokens_within(config, grid.num_hosts)",
        "tests/unit/test_one_host.py"
        "::test_fixed_sizes_have_room_for_the_tokens_of_all_hosts_at_once",
    ),
    Mutation(
        "backends that share a memory count their rows once each",
        'return {id(getattr(one, "memory", one)): one for one in self._within}.values()',
        "return {id(one): one for one in self._within}.values()",
        "tests/unit/test_one_host.py::test_backends_of_one_memory_count_once",
    ),
    Mutation(
        "records over hosts have ranks at wrong places",
        "before = (0,) * grid.ranks_within.start",
        "before = (0,) * grid.host",
        "tests/unit/test_one_host.py::test_records_have_the_ranks_of_a_host_at_their_places",
    ),
    Mutation(
        "what crosses behind the first report is never told",
        "self._taken = dataclasses.replace(self._rail.crossed)",
        "self._taken = self._rail.crossed",
        "tests/unit/test_one_host.py::test_each_report_has_what_has_crossed_since_the_last",
    ),
    Mutation(
        "a refusal takes part in one of a host's launches: the others wait",
        "            for _ in range(launches[number]):\n                self.within.refuse(reason)",
        "            self.within.refuse(reason)",
        "tests/unit/test_one_host.py::test_a_refusal_takes_part_in_every_launch_of_the_host",
    ),
    Mutation(
        "the reason of a failure is replaced by hosts that have gone since",
        "                        stack.enter_context(contextlib.suppress(FlashMoEError))\n",
        "",
        "tests/unit/test_one_host.py"
        "::test_the_reason_of_a_failure_is_told_though_other_hosts_have_gone_since",
    ),
    Mutation(
        "a backward that fails within a host sends rows of another width",
        "width = min(topk, self._experts_per_host)",
        "width = topk",
        "tests/unit/test_one_host.py"
        "::test_what_a_backward_that_fails_sends_is_as_wide_as_other_hosts_expect",
    ),
    Mutation(
        "weights that are transposed since are not looked at",
        "form = (device, weights.transposed, *map(len, kinds))",
        "form = (device, *map(len, kinds))",
        "tests/unit/test_one_host.py::test_weights_that_are_transposed_since_are_looked_at_again",
    ),
    Mutation(
        "a refusal sends rows of another dtype",
        "no_tokens = none.new_empty(0, self.config.hidden, dtype=self._dtype)",
        "no_tokens = none.new_empty(0, self.config.hidden)",
        "tests/unit/test_one_host.py::test_a_refusal_takes_part_in_every_launch_of_the_host",
    ),
    Mutation(
        "with fixed sizes nobody refuses an unusable routing",
        "own.copy_(torch.where(choices.is_bad, experts_per_host, own))",
        "own.copy_(own)",
        "tests/unit/test_one_host.py::test_with_fixed_sizes_a_host_refuses_its_own_tokens_routing",
    ),
    Mutation(
        "a launch without routes has no locality",
        "if stays) / total if total else 1.0",
        "if stays) / total if total else 0.0",
        "tests/replicas/test_popular.py::test_routes_that_stay_on_their_rank",
    ),
    Mutation(
        "ranks with different fits have different degrees: a deadlock",
        "    if len(set(everyone)) > 1:\n",
        "    if False:\n",
        "tests/unit/test_schedule_fit.py::test_ranks_measure_and_choose_degrees",
    ),
    Mutation(
        "every fit looks good",
        "whole = sum((t - mean) ** 2 for t in times_s)",
        "whole = sum(t**2 for t in times_s)",
        "tests/unit/test_schedule_fit.py"
        "::test_a_line_that_tells_nothing_has_no_share_of_the_variance",
    ),
    Mutation(
        "sizes do not span what they should",
        "ratio = span ** (1 / (points - 1))",
        "ratio = span ** (1 / points)",
        "tests/unit/test_schedule_fit.py::test_sizes_are_at_even_ratios_from_a_part_to_the_most",
    ),
    Mutation(
        "SoftMoE refuses tokens of four dimensions",
        "given = x.reshape(-1, x.shape[-2], width) if is_soft else x.reshape(-1, width)",
        "given = x if is_soft else x.reshape(-1, width)",
        "tests/unit/test_gates.py::test_tokens_may_have_any_number_of_dimensions",
    ),
    Mutation(
        "scores begin too close to each other",
        "return nn.Parameter(torch.empty(rows, width).uniform_(-1, 1) / math.sqrt(width))",
        "return nn.Parameter(torch.empty(rows, width).uniform_(-1, 1) / width)",
        "tests/unit/test_gates.py::test_scores_begin_as_those_of_a_linear_layer",
    ),
    Mutation(
        "without a capacity second choices are never left out",
        "        kept = tried\n",
        "        kept = torch.ones_like(tried)\n",
        "tests/unit/test_gates.py"
        "::test_gshard_without_a_capacity_drops_nothing_and_tries_second_choices_all_the_same",
    ),
    Mutation(
        "what the user has told DDP to leave out is forgotten",
        "    ignored += [name for name in getattr(model, _IGNORED, ()) if name not in ignored]\n",
        "",
        "tests/unit/test_data_parallel.py::test_what_is_refused",
    ),
    Mutation(
        "groups of different sizes are accepted",
        "if covered != sorted(members) or len({len(one) for one in groups}) > 1:",
        "if covered != sorted(members):",
        "tests/unit/test_data_parallel.py::test_groups_of_experts_divide_the_ranks_evenly",
    ),
    Mutation(
        "an evaluation without sync between forward and backward leaves gradients unreduced",
        "if model is not None and torch.is_grad_enabled():",
        "if model is not None:",
        "tests/unit/test_data_parallel.py"
        "::test_an_evaluation_before_a_backward_leaves_its_reduction",
    ),
    Mutation(
        "a mesh of two dimensions is accepted",
        "            if group.ndim != 1:",
        "            if False:",
        "tests/unit/test_data_parallel.py::test_what_is_refused",
    ),
    Mutation(
        "buckets are larger by an element's bytes",
        "max(plan.piece_bytes // size, 1)",
        "max(plan.piece_bytes, 1)",
        "tests/deepspeed/test_slices.py::test_buckets_have_as_many_elements_as_fit",
    ),
    Mutation(
        "gradients that nobody shares are taken to be reduced",
        "own = numbers[True] * is_reduced[True] // max(len(layers), 1)",
        "own = numbers[True] // max(len(layers), 1)",
        "tests/deepspeed/test_slices.py::test_buckets_have_as_many_elements_as_fit",
    ),
    Mutation(
        "buckets of which some are due are not reduced",
        "return overlaps and any(group.is_last_microbatch for group in self._groups)",
        "return overlaps and all(group.is_last_microbatch for group in self._groups)",
        "tests/megatron/test_ddp_hooks.py"
        "::test_a_bucket_in_its_last_micro_batch_is_due_whatever_the_others_are_in",
    ),
    Mutation(
        "stages of a pipeline count as ranks with the same experts",
        'apart = stages * number(args, "expert_model_parallel_size", 1) * expert_tensor_size(args)',
        'apart = number(args, "expert_model_parallel_size", 1) * expert_tensor_size(args)',
        "tests/megatron/test_notices.py::test_stages_of_a_pipeline_share_no_experts",
    ),
    Mutation(
        "a dry run of one process waits for ranks that are made up",
        '    if dist.get_backend(group) == "fake":',
        "    if False:",
        "tests/megatron/test_peers.py::test_ranks_that_are_made_up_are_not_waited_for",
    ),
    Mutation(
        "only the first weight of a module is reduced",
        '        for hook in getattr(module, "wgrad_accumulation_and_reduce_hooks", ()):\n'
        "            hook()",
        '        for hook in getattr(module, "wgrad_accumulation_and_reduce_hooks", '
        "())[:1]:\n            hook()",
        "tests/megatron/test_schedule.py"
        "::test_every_weight_of_a_module_is_reduced_and_the_last_modules_first",
    ),
    Mutation(
        "launches go on with addresses of the old heap",
        "        self._heap_bounds = self.bounds\n        self._groups.clear()\n",
        "        self._heap_bounds = self.bounds\n",
        "tests/unit/test_group_memory.py::test_launches_go_on_in_the_memory_that_was_made_last",
    ),
    Mutation(
        "a new heap is taken to have the old one's replicas",
        "        self._heap_bounds = self.bounds\n        self._groups.clear()\n"
        "        self._last_record = bindings.FlashMoERecord()\n"
        "        self.is_void = False\n        self.settled_for = None\n",
        "        self._heap_bounds = self.bounds\n        self._groups.clear()\n"
        "        self._last_record = bindings.FlashMoERecord()\n        self.is_void = False\n",
        "tests/unit/test_group_memory.py::test_launches_go_on_in_the_memory_that_was_made_last",
    ),
    Mutation(
        "a fault is given up sooner since there was one before",
        "        self._known_since = None\n        self.is_void = self.is_void or fault.code",
        "        self.is_void = self.is_void or fault.code",
        "tests/unit/test_group_memory.py::test_each_fault_has_its_own_time",
    ),
    Mutation(
        "NVLink multicast is used",
        '    os.environ["NVSHMEM_DISABLE_NVLS"] = "1"\n',
        "",
        "tests/unit/test_group_memory.py"
        "::test_no_rank_signals_into_memory_that_another_still_zeroes",
    ),
    Mutation(
        "a signal into memory that is being zeroed is lost",
        "    dist.barrier(ranks)  # nobody signals into memory that is still being zeroed\n",
        "",
        "tests/unit/test_group_memory.py"
        "::test_no_rank_signals_into_memory_that_another_still_zeroes",
    ),
    Mutation(
        "tables of weights that move pile up",
        "        if len(tables) >= MOST_LAYERS:\n"
        "            self._memory.captured.keep(*tables.values())\n            tables.clear()\n",
        "",
        "tests/unit/test_stacks.py::test_tables_of_weights_that_move_do_not_pile_up",
    ),
    Mutation(
        "rows of replicas do not fit a bound that they are within",
        "blocks = bounded_row_blocks(self.config, self.options.row_bound) + self.spare_slots",
        "blocks = bounded_row_blocks(self.config, self.options.row_bound)",
        "tests/unit/test_in_step.py::test_a_bound_has_room_for_a_block_of_each_spare_slot",
    ),
    Mutation(
        "others reduce gradients that have not been handed on yet",
        "self._early_number = number if grads.are_own else 0",
        "self._early_number = number",
        "tests/unit/test_in_step.py"
        "::test_gradients_that_are_handed_on_are_complete_with_their_backward_alone",
    ),
    Mutation(
        "a refused forward leaves its replicas to the next one",
        "        self.num_calls += 1\n        self.memory.settled_for = None\n"
        "        if self.config.num_ranks == 1",
        "        self.num_calls += 1\n        if self.config.num_ranks == 1",
        "tests/unit/test_in_step.py::test_another_launch_ends_what_was_settled",
    ),
    Mutation(
        "a table is kept for gradients that are gone",
        "            if grads[0].accumulate:  # main_grad stays where it is; ordinary "
        "gradients do not\n",
        "            if True:\n",
        "tests/unit/test_stacks.py::test_the_kernel_knows_gradients_that_stay_where_they_are",
    ),
    Mutation(
        "launches on two streams share memory at once",
        "        if last is not None and not torch.cuda.is_current_stream_capturing():",
        "        if False:",
        "tests/unit/test_group_memory.py"
        "::test_launches_on_another_stream_are_behind_those_on_the_last",
    ),
    Mutation(
        "a graph captures a lookahead that no replay asks for",
        "        if not self.spare_slots:\n            return\n"
        "        if torch.cuda.is_current_stream_capturing():\n            raise ConfigError(",
        "        if not self.spare_slots:\n            return\n        if False:\n"
        "            raise ConfigError(",
        "tests/unit/test_in_step.py::test_another_launch_ends_what_was_settled",
    ),
    Mutation(
        "keeping all is said to cost time",
        'if settings.keep not in ("auto", "all") and recomputes_layers(config):',
        'if settings.keep != "auto" and recomputes_layers(config):',
        "tests/megatron/test_ignored.py::test_keeping_less_of_what_is_recomputed_is_said",
    ),
    Mutation(
        "autocast does not reach experts",
        "experts, torch.get_autocast_dtype(device.type) if is_autocast else None",
        "experts, None",
        "tests/frameworks/test_transformers.py"
        "::test_autocast_reaches_experts_in_a_seat_of_their_own",
    ),
    Mutation(
        "evaluation counts as training",
        "    seat.is_training = experts.training\n",
        "",
        "tests/frameworks/test_transformers.py::test_records_tell_evaluation",
    ),
    Mutation(
        "experts that are no stack fail without a name",
        "    if fc1.dim() != 3:",
        "    if False:",
        "tests/frameworks/test_transformers.py::test_experts_that_are_no_stack_are_refused_by_name",
    ),
    Mutation(
        "experts in another dtype take the seat of the first",
        "key = device, topk, dtype, (sizes",
        "key = device, topk, torch.float32, (sizes",
        "tests/frameworks/test_transformers.py"
        "::test_autocast_reaches_experts_in_a_seat_of_their_own",
    ),
    Mutation(
        "exchanges are taken to be four times as slow",
        "return _samples(clock, {float(one.nbytes): exchange(one, group) for one in buffers})",
        "return _samples(clock, {float(one.numel()): exchange(one, group) for one in buffers})",
        "tests/unit/test_schedule_fit.py::test_ranks_measure_and_choose_degrees",
    ),
    Mutation(
        "times are the fastest rank's",
        "dist.all_reduce(taken, op=dist.ReduceOp.MAX, group=self._group)",
        "dist.all_reduce(taken, op=dist.ReduceOp.MIN, group=self._group)",
        "tests/unit/test_schedule_fit.py::test_ranks_measure_and_choose_degrees",
    ),
    Mutation(
        "all ranks measure with the same routes",
        "manual_seed(backend.rank)",
        "manual_seed(0)",
        "tests/unit/test_schedule_fit.py::test_routes_to_be_timed_differ_between_ranks",
    ),
    Mutation(
        "launches of before training are in the first report",
        "        self._take_records()  # what was before belongs to no step\n",
        "",
        "tests/unit/test_telemetry_reports.py::test_what_was_before_the_first_step_is_in_no_report",
    ),
    Mutation(
        "DDP hears of experts before the last accumulator has run",
        "        if this.num_arrived < len(this.params):\n            return\n",
        "",
        "tests/megatron/test_ddp_hooks.py::test_what_autograd_brings_besides_is_added_unless_megatron_drops_it",
    ),
    Mutation(
        "the mark of a gradient that a launch has added is left on the parameter",
        "        owner.grad_added_to_main_grad = is_marked\n",
        "",
        "tests/megatron/test_ddp_hooks.py::test_what_autograd_brings_besides_is_added_unless_megatron_drops_it",
    ),
    Mutation(
        "with fusion what autograd brings is added to what launches have added",
        "                param.grad_added_to_main_grad = True  # type: ignore[attr-defined]\n",
        "                pass\n",
        "tests/megatron/test_ddp_hooks.py::test_what_autograd_brings_besides_is_added_unless_megatron_drops_it",
    ),
    Mutation(
        "hooks on gradient accumulators see nothing",
        "return sum(map(len, self._on_accumulators)) != own or any(",
        "return any(",
        "tests/megatron/test_ddp_hooks.py::test_what_others_have_to_see_they_see",
    ),
    Mutation(
        "a pass for some parameters adds to all of them",
        "is_trained and accumulates(node)\n",
        "is_trained\n",
        "tests/megatron/test_ddp_hooks.py::test_only_those_that_are_asked_for_get_a_gradient",
    ),
    Mutation(
        "a pass for some parameters counts as one for all",
        "    if accumulates(_anchor_on(device).accumulator):\n",
        "    if True:\n",
        "tests/megatron/test_ddp_hooks.py::test_only_those_that_are_asked_for_get_a_gradient",
    ),
    Mutation(
        "layers with the same experts each have DDP hear of them",
        "            return one if one.serve(params, fuses=fuses) else None\n",
        "            pass\n",
        "tests/megatron/test_ddp_hooks.py::test_layers_with_the_same_experts_share_what_ddp_hears",
    ),
    Mutation(
        "weights may be written in place between a forward and its backward",
        "    since = _versions_of(weights) - versions\n",
        "    since = 0\n",
        "tests/megatron/test_ddp_hooks.py::test_weights_that_were_changed_in_place_are_refused",
    ),
    Mutation(
        "gradients that come after their reduction go unnoticed",
        "        if came >= wanted:\n            raise _mis",
        "        if False:\n            raise _mis",
        "tests/megatron/test_ddp_gradients.py::test_recomputed_calls_whose_number_varies_are_an_error",
    ),
    Mutation(
        "gradients that a reduction waits for are not named",
        "            if group.grad_reduce_handle is None and came < wanted:\n",
        "            if False:\n",
        "tests/megatron/test_ddp_gradients.py::test_recomputed_calls_whose_number_varies_are_an_error",
    ),
    Mutation(
        "a configuration is not checked again when a layer is built",
        "        refuse(config, CONFIG_REFUSALS)\n        if getattr(config, OVERLAP",
        "        if getattr(config, OVERLAP",
        "tests/megatron/test_layer.py::test_a_configuration_that_was_changed_since_is_refused",
    ),
    Mutation(
        "experts of which some have biases are accepted",
        "    if not any(found):\n        return ()",
        "    if not all(found):\n        return ()",
        "tests/megatron/test_layer.py::test_experts_of_which_some_have_biases_are_refused",
    ),
    Mutation(
        "experts are probed in training mode alone",
        "itertools.product(PROBE_SCALES, (True, False))",
        "itertools.product(PROBE_SCALES, (True,))",
        "tests/deepspeed/test_experts.py::test_unknown_experts_are_refused",
    ),
    Mutation(
        "sums in float32 do not keep a collective from starting early",
        'not getattr(config, "reduce_scatter_with_fp32_accumulation", False)',
        "True",
        "tests/megatron/test_grad_reduce.py::test_a_gradient_that_came_since_makes_a_bucket_late",
    ),
    Mutation(
        "a CUDA graph without a scope is accepted",
        "return not parts or not parts <= allowed",
        "return not parts <= allowed",
        "tests/megatron/test_refusals.py::test_newer_settings_are_refused",
    ),
    Mutation(
        "tokens per rank are rounded down",
        "-(-seq_length // shards) * micro_batch_size",
        "seq_length // shards * micro_batch_size",
        "tests/megatron/test_refusals.py::test_the_longest_share_of_a_sequence_bounds_the_tokens",
    ),
    Mutation(
        "more rows are expected than the capacity admits",
        "        expected = min(expected, rows)\n",
        "",
        "tests/unit/test_planner.py::test_no_more_rows_are_expected_than_the_capacity_admits",
    ),
    Mutation(
        "forward pre-hooks of others than DDP are left out without a word",
        "        if not waits_for_parameters(hook):\n            name",
        "        if False:\n            name",
        "tests/megatron/test_layer.py::test_changed_experts_are_refused_by_name",
    ),
    Mutation(
        "parameters are not awaited where experts are not called",
        "        if waits_for_parameters(hook):\n            hook(module)\n",
        "        pass\n",
        "tests/megatron/test_layer.py::test_parameters_are_awaited_as_often_as_by_a_module",
    ),
    Mutation(
        "float64 probabilities are rounded to the tokens' dtype",
        "probs = probs.float()",
        "probs = probs.to(x.dtype)",
        "tests/megatron/test_layer.py"
        "::test_probabilities_in_float64_are_not_rounded_to_the_tokens_dtype",
    ),
    Mutation(
        "launches that warm up count in T(2)",
        "    run(WARM_UP)\n    layer.backend.take_records()\n",
        "    run(WARM_UP)\n",
        "tests/unit/test_calibrate.py::test_launches_that_warm_up_are_not_averaged",
    ),
    Mutation(
        "the table of biases begins with those of fc2",
        'biases = addresses.get("fc1_bias", []) + addresses.get("fc2_bias", [])',
        'biases = addresses.get("fc2_bias", []) + addresses.get("fc1_bias", [])',
        "tests/unit/test_weights.py::test_the_kernel_finds_each_bias_where_it_looks_for_it",
        on_gpu="tests/gpu/test_variants.py::test_biases[bf16-grad-gated-2]",
    ),
    Mutation(
        "a weight's strides are left out of its table's key",
        "first.shape, first.stride(), first.dtype, heap)",
        "first.shape, first.dtype, heap)",
        "tests/unit/test_weights.py"
        "::test_the_kernel_refuses_a_view_at_the_address_of_a_weight_that_it_knows",
        on_gpu="tests/gpu/test_bad_input.py"
        "::test_a_view_at_the_address_of_a_known_weight_is_refused",
    ),
    Mutation(
        "a heap is kept that is too small for the next layer",
        "            or self.heap_bytes < sizes.heap_bytes\n",
        "",
        "tests/unit/test_group_memory.py::test_it_never_shrinks",
        on_gpu="tests/gpu/test_launches.py"
        "::test_a_wider_layer_within_the_same_bounds_gets_a_larger_heap",
    ),
    Mutation(
        "a heap that does not fit is allocated all the same",
        "    if nbytes > least:\n",
        "    if False:\n",
        "tests/unit/test_group_memory.py"
        "::test_a_heap_that_does_not_fit_is_refused_before_it_is_allocated",
    ),
    Mutation(
        "a wrapper of a process group passes for its own",
        '    values = getattr(group, "__dict__", {}).values()\n',
        "    values = ()\n",
        "tests/unit/test_wrapped_groups.py::test_which_group_a_wrapper_stands_for",
    ),
    Mutation(
        "layers look for what their group shares by its wrapper",
        "key = (torch_group(group), device, settings, max_tokens, torch_group(tensor_group))",
        "key = (object(), device, settings, max_tokens, torch_group(tensor_group))",
        "tests/megatron/test_wrapped_groups.py::test_layers_match_alltoall_over_sleeps",
    ),
    Mutation(
        "a layer that misses many groups keeps the backends of all between",
        "self._last[0], made._last = made, self._last",
        "self._last[0] = made",
        "tests/unit/test_wrapped_groups.py"
        "::test_a_wrapper_has_the_backends_of_one_group_however_often_it_sleeps",
    ),
    Mutation(
        "layers that share a backend part when their group is made again",
        "    if last is None or _origins[last].is_over:\n",
        "    if True:\n",
        "tests/unit/test_wrapped_groups.py"
        "::test_layers_are_right_whenever_their_group_is_made_again",
    ),
    Mutation(
        "parameters name a process group that is gone",
        "        mesh._dim_group_names = made._dim_group_names\n",
        "        pass\n",
        "tests/unit/test_wrapped_groups.py"
        "::test_layers_are_right_whenever_their_group_is_made_again",
    ),
    Mutation(
        "a rank frees memory that a peer has not left",
        "            return all(self._store.check([key]) for key in keys)\n",
        "            return any(self._store.check([key]) for key in keys)\n",
        "tests/unit/test_ending.py::test_no_rank_frees_what_another_one_uses",
    ),
    Mutation(
        "a rank that destroys a group early keeps the memory for good",
        "    elif _left:\n        _free_left()\n",
        "",
        "tests/unit/test_ending.py::test_no_rank_frees_what_another_one_uses",
    ),
    Mutation(
        "a heap outlives its group",
        "        self._heap, self.heap_bytes, self._workspace_bytes = None, 0, 0\n",
        "        self.heap_bytes, self._workspace_bytes = 0, 0\n",
        "tests/unit/test_ending.py::test_no_rank_frees_what_another_one_uses",
        on_gpu="tests/gpu/test_ending.py::test_memory_is_free_between_two_groups",
    ),
    Mutation(
        "a heap is freed that a graph of the user's has captured",
        "            if _drop is None:\n",
        "            if False:\n",
        "tests/unit/test_ending.py::test_graphs_are_dropped_with_their_group",
    ),
    Mutation(
        "Megatron's graph outlives the heap that it has captured",
        "            graph.reset()\n",
        "",
        "tests/megatron/test_graphs.py"
        "::test_graphs_of_a_group_that_is_destroyed_are_captured_again",
    ),
    Mutation(
        "groups between hosts outlive the group that they are for",
        "        destroy_own(self.rail)\n",
        "",
        "tests/unit/test_ending.py::test_groups_between_hosts_end_with_the_whole_one",
    ),
    Mutation(
        "a clamped gate keeps its gradient",
        "grad_gate * (gate <= config.clamp_value)",
        "grad_gate * (gate < math.inf)",
        "tests/unit/test_autograd.py::test_gradients_are_the_slopes_of_the_function[gpt-oss]",
    ),
    Mutation(
        "sequential experts are read in blocks of rows",
        'if hasattr(experts, "local_experts"):\n        return 0',
        "if experts is None:\n        return 0",
        "tests/megatron/test_refusals.py::test_grouped_experts_alone_have_rows_in_blocks",
    ),
    Mutation(
        "columns of probabilities are not sorted with their routes",
        "token_idx, column_idx = token_idx[by_expert], column_idx[by_expert]",
        "token_idx = token_idx[by_expert]",
        "tests/unit/test_choices.py::test_both_forms_are_equal_bit_by_bit",
    ),
    Mutation(
        "experts that another rank has saved are loaded",
        "    if part != own:\n",
        "    if False:\n",
        "tests/unit/test_checkpoints.py::test_a_file_of_another_rank_is_refused",
    ),
    Mutation(
        "loaded experts are on the mesh of the rank that saved them",
        "        parameter.device_mesh,\n        parameter.placements,\n        run_check=False,",
        "        given.device_mesh,\n        parameter.placements,\n        run_check=False,",
        "tests/unit/test_checkpoints.py::test_a_file_of_another_rank_is_refused",
    ),
    Mutation(
        "experts below a parametrization are loaded from any rank's file",
        "for name, parameter in self.named_parameters():\n            key",
        "for name, parameter in self.named_parameters(recurse=False):\n            key",
        "tests/unit/test_checkpoints.py::test_parametrized_experts_of_another_rank_are_refused",
    ),
    Mutation(
        "a router with hooks is not called",
        "        if _what_it_adds(router) is None:\n",
        "        if isinstance(router, nn.Linear):\n",
        "tests/unit/test_own_router.py::test_a_changed_router_is_called[forward hook]",
    ),
    Mutation(
        "a launch takes a router with a bias",
        '    if router.bias is not None:\n        return "has a bias"\n',
        "",
        "tests/unit/test_own_router.py::test_a_launch_takes_a_changed_router_for_no_other[bias]",
    ),
    Mutation(
        "hooks on all modules do not see a router",
        "    if _has_any_global_hook():\n",
        "    if False:\n",
        "tests/unit/test_own_router.py::test_hooks_on_all_modules_see_the_router",
    ),
    Mutation(
        "a router with a hook computes in bfloat16",
        "        with _Wide():\n            logits: torch.Tensor = router(tokens.float())\n",
        "        if True:\n            logits: torch.Tensor = router(tokens)\n",
        "tests/unit/test_own_router.py::test_looking_at_a_router_changes_no_bits[torch.bfloat16]",
    ),
    Mutation(
        "a router's output is not looked at",
        "    if logits.shape != wanted or not logits.is_floating_point():\n",
        "    if False:\n",
        "tests/unit/test_own_router.py::test_what_gives_no_logits_is_refused",
    ),
    Mutation(
        "a call without a result leaves an adapter of the router out",
        "parts = [local_part(one).flatten().float() for one in self.router.parameters()]",
        "parts = [local_part(next(self.router.parameters())).flatten()]",
        "tests/unit/test_own_router.py::test_a_call_without_a_result_spoils_all_of_a_router",
    ),
    Mutation(
        "parameters that others are computed from are drawn without effect",
        "    if not isinstance(given, nn.Parameter):\n        raise ConfigError(",
        "    if False:\n        raise ConfigError(",
        "tests/unit/test_own_router.py::test_a_reset_draws_nothing_that_is_computed",
    ),
    Mutation(
        "a layer's backend is looked for by fc2 where it is computed",
        "            fc2 = self.fc2\n",
        '            fc2 = self._parameters["fc2"]\n',
        "tests/unit/test_layer.py::test_experts_may_be_pruned_or_parametrized",
    ),
    Mutation(
        "a plain parameter of a parametrization is left out of what ranks share",
        "                    if isinstance(parameter, DTensor) or self.config.num_ranks == 1:\n",
        "                    if True:\n",
        "tests/unit/test_data_parallel.py::test_batches_and_experts_of_other_kinds",
    ),
    Mutation(
        "a wrapped soft gate mixes tokens of all sequences",
        "_within(self.gate, SoftMoEGate) is not None",
        "isinstance(self.gate, SoftMoEGate)",
        "tests/unit/test_gates.py::test_gate_and_layer_may_be_wrapped",
    ),
    Mutation(
        "ranks wait for one that Join has let end",
        "if model is not None and model._join_config.enable:",
        "if False:",
        "tests/unit/test_data_parallel.py::test_batches_and_experts_of_other_kinds",
    ),
    Mutation(
        "a backward begins that some ranks do not have",
        "if ctx.unfollowed:  # before",
        "if False:  # before",
        "tests/unit/test_unfollowed.py::test_ranks_without_a_backward_are_named[reference-2-all]",
    ),
    Mutation(
        "ranks without a backward never hear why the others have refused theirs",
        "            ctx.backend.put_off(error)\n",
        "",
        "tests/unit/test_unfollowed.py::test_ranks_without_a_backward_are_named[scheduled-2-all]",
    ),
    Mutation(
        "a recorded forward that keeps its inputs alone tells that no backward follows",
        "                    followed=True,\n",
        "",
        "tests/unit/test_unfollowed.py::test_ranks_without_a_backward_are_named[reference-2-inputs]",
    ),
    Mutation(
        "the reference takes the mark of a rank without a backward for rows",
        "told[list(unfollowed)] -= UNFOLLOWED",
        "pass",
        "tests/unit/test_unfollowed.py::test_ranks_without_a_backward_are_named[reference-4-all]",
    ),
    Mutation(
        "the device takes the mark of a rank without a backward for rows",
        "received = received % UNFOLLOWED",
        "pass",
        "tests/unit/test_unfollowed.py::test_ranks_without_a_backward_are_named[scheduled-4-all]",
    ),
    Mutation(
        "where all ranks know all counts they take the mark of a rank without a backward for rows",
        "all_counts = without_marks(Table.of(others[num_received:], num_experts))",
        "all_counts = Table.of(others[num_received:], num_experts)",
        "tests/unit/test_unfollowed.py::test_ranks_without_a_backward_are_named[two steps]",
    ),
    Mutation(
        "a refusal by a rank without a backward passes for rows",
        "if count > UNFOLLOWED // 2)",
        "if count >= UNFOLLOWED)",
        "tests/unit/test_unfollowed.py::test_a_rank_without_a_backward_hears_and_tells_refusals[scheduled]",
    ),
    Mutation(
        "ranks that share experts get numbers that no rank of the group has",
        "tuple(sorted({source % config.num_ranks for source in sources}))",
        "sources",
        "tests/unit/test_unfollowed.py::test_ranks_that_share_experts_hear_of_each_other",
    ),
    Mutation(
        "ranks of other hosts do not tell that they have no backward",
        "words[1].fill_(len(leaves) if followed else len(leaves) + UNFOLLOWED)",
        "words[1].fill_(len(leaves))",
        "tests/unit/test_unfollowed.py::test_ranks_without_a_backward_are_named[hosts]",
    ),
)


def place_of(mutation: Mutation, root: Path = ROOT) -> Path:
    """The file that has a mutation's line.

    Raises:
        ValueError: The line is not in the package exactly once; says where it is.
    """
    files = sorted((root / PACKAGE).rglob("*.py"))
    counts = {file: file.read_text().count(mutation.old) for file in files}
    found = [file for file, count in counts.items() for _ in range(count)]
    if len(found) != 1:
        listed = ", ".join(str(file.relative_to(root)) for file in found) or "nowhere"
        raise ValueError(f"{mutation.name}: wanted once, found {listed}:\n{mutation.old}")
    return found[0]


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


def judge(mutation: Mutation, directory: Path, *, on_gpu: bool) -> tuple[str, str]:
    """Applies a mutation to a copy of the tree, runs its tests and takes it back.

    Args:
        mutation: The change.
        directory: The copy.
        on_gpu: Whether to run the test that wants a GPU in place of the other.

    Returns:
        "caught", "missed" or "broken", and pytest's output.
    """
    place = place_of(mutation, directory)
    text = place.read_text()
    place.write_text(text.replace(mutation.old, mutation.new))
    try:
        done = _pytest(directory, [mutation.on_gpu if on_gpu else mutation.caught_by])
    finally:
        place.write_text(text)
    is_skipped = " passed" not in done.stdout and " skipped" in done.stdout
    outcome = {FAILED: "caught", PASSED: "missed"}.get(done.returncode, "broken")
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
        for one in chosen:
            place = place_of(one).relative_to(ROOT)
            sys.stdout.write(f"| {one.name} | `{place}` | `{one.caught_by}` |\n")
        return 0
    outcomes = []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        _copy(directory)
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
            outcome, said = judge(one, directory, on_gpu=options.gpu)
            outcomes.append(outcome)
            sys.stdout.write(f"{outcome} in {time.monotonic() - begin:.0f} s: {one.name}\n")
            if outcome == "broken":
                sys.stdout.write(f"{said[-4000:]}\n")
            sys.stdout.flush()
    sys.stdout.write(f"{outcomes.count('caught')} of {len(outcomes)} caught\n")
    return 0 if set(outcomes) <= {"caught"} else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
