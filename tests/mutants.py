"""Faults that the tests must find: each mutant breaks the package in one place, as a slip in a change would.

`make mutants` applies one after the other to a copy of the package, and prints which test finds it (run_mutants.py).
Each is a fault that a user could suffer from: a wrong result, a hang, a leak, or an error that is lost or misleads.
"""

from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent


class Mutant(NamedTuple):
    """A change of one file.

    Attributes:
        name: what is wrong.
        file: the path below torchbagua.
        old: text that occurs once in the file.
        new: the text that replaces it.
    """

    name: str
    file: str
    old: str
    new: str

    @property
    def package(self) -> str:
        """The package of the core that it breaks."""
        return "native" if self.file.startswith("../csrc_cuda") else self.file.split("/")[0]

    @property
    def path(self) -> Path:
        """The file below the root of the repository."""
        return Path(
            "csrc_cuda" if self.file.startswith("../") else "torchbagua", self.file.removeprefix("../csrc_cuda/")
        )

    def source(self, root: Path = ROOT) -> str:
        """Return the text of the file with the fault."""
        text = (root / self.path).read_text(encoding="utf-8")
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: the old text must occur once in {self.path}, got {text.count(self.old)}")
        return text.replace(self.old, self.new)


TRANSPORT = (
    Mutant(
        "a_send_is_not_waited_for",
        "transport/communicator.py",
        "                transport.wait_send(peer, tag)\n",
        "",
    ),
    Mutant(
        "messages_of_all_channels_have_one_tag",
        "transport/communicator.py",
        "return _TAGS[operation] + channel * len(_TAGS)",
        "return _TAGS[operation]",
    ),
    Mutant(
        "a_ring_message_goes_the_other_way_round",
        "transport/communicator.py",
        "self._target, self._source = communicator.rank_after(distance), communicator.rank_before(distance)",
        "self._target, self._source = communicator.rank_before(distance), communicator.rank_after(distance)",
    ),
    Mutant(
        "a_closed_group_forgets_why_it_was_closed",
        "transport/communicator.py",
        'self._ends.append("" if failure is None else str(failure))',
        'self._ends.append("")',
    ),
    Mutant(
        "errors_lack_the_global_rank",
        "transport/communicator.py",
        "self.ranks[rank], self._global_ranks[rank]",
        "self.ranks[rank], self.ranks[rank]",
    ),
    Mutant(
        "all_roles_share_one_scratch_memory",
        "transport/communicator.py",
        "self._scratch.setdefault((role, stream), {})",
        'self._scratch.setdefault(("", stream), {})',
    ),
    Mutant(
        "a_twin_stays_open_after_a_close",
        "transport/communicator.py",
        "            twin.close(failure)\n",
        "            pass\n",
    ),
    Mutant(
        "a_wait_on_a_closed_group_returns_without_data",
        "transport/base.py",
        "        elif self.is_closed:  # by another thread, which has dropped the works\n",
        "        elif False:\n",
    ),
    Mutant(
        "a_rank_that_gave_up_counts_as_ready_to_connect",
        "transport/gloo.py",
        "                ready.write_text(own_keys, _GAVE_UP)\n",
        "                pass\n",
    ),
    Mutant(
        "both_ranks_of_a_link_have_the_same_number",
        "transport/gloo.py",
        "own_number = int(self._rank > peer)",
        "own_number = 0",
    ),
    Mutant(
        "a_late_answer_of_the_store_silences_it_for_ever",
        "transport/store_requests.py",
        "if self._silent is not None and self._silent.locked():",
        "if self._silent is not None:",
    ),
    Mutant(
        "missing_ranks_are_counted_from_the_middle",
        "transport/store_requests.py",
        "self.missing(keys[half:], start + half)",
        "self.missing(keys[half:], start)",
    ),
    Mutant(
        "uneven_all_to_all_swaps_sent_and_received_lengths",
        "transport/torch_backend.py",
        "for tensors in (inputs, outputs))",
        "for tensors in (outputs, inputs))",
    ),
)

COLLECTIVES = (
    Mutant(
        "the_mean_in_full_precision_sums_the_own_values_first",
        "collectives/mean.py",
        "rows = [*rows[:rank], self._wires[rank], *rows[rank + 1 :]]",
        "rows = [self._wires[rank], *rows[:rank], *rows[rank + 1 :]]",
    ),
    Mutant(
        "the_own_mean_is_not_decoded",
        "collectives/mean.py",
        "            self._decode(chunks.rank)\n            for owner",
        "            for owner",
    ),
    Mutant(
        "the_mean_returns_while_it_still_sends",
        "collectives/mean.py",
        "        pipeline.wait_for_sends()\n        self._overlap.end(self._channel)\n",
        "        self._overlap.end(self._channel)\n",
    ),
    Mutant(
        "the_residual_of_the_mean_ignores_where_the_shard_begins",
        "collectives/mean.py",
        "mean=slice(start + own.start, start + own.stop)",
        "mean=slice(own.start, own.stop)",
    ),
    Mutant(
        "the_second_piece_uses_the_residual_of_the_first",
        "collectives/mean.py",
        "return slice(self.own.start - self._chunk_start, self.own.stop - self._chunk_start)",
        "return slice(0, self.own.stop - self.own.start)",
    ),
    Mutant(
        "a_failed_redistribution_loses_residuals",
        "collectives/mean.py",
        "total_N = x_N.clone()  # a failure leaves `x_N` unchanged",
        "total_N = x_N",
    ),
    Mutant(
        "float16_sums_overflow_before_they_are_divided",
        "collectives/all_reduce_mean.py",
        "divides_first or spec.dtype == torch.float16",
        "divides_first",
    ),
    Mutant(
        "two_means_in_flight_share_a_channel",
        "collectives/exchange.py",
        "(self._num_means - 1) % _MAX_MEANS * _MAX_PIECES",
        "(self._num_means - 1) % _MAX_MEANS",
    ),
    Mutant(
        "an_exchange_returns_while_it_still_sends",
        "collectives/exchange.py",
        "        self.wait()\n        self._pipeline.wait_for_sends()\n",
        "        self.wait()\n",
    ),
    Mutant(
        "the_last_rank_receives_no_broadcast",
        "collectives/broadcast.py",
        "if rank < distance and rank + distance < communicator.size:",
        "if rank < distance and rank + distance < communicator.size - 1:",
    ),
    Mutant(
        "a_second_backward_adds_the_residual_again",
        "collectives/residuals.py",
        "                self._continued[own] = self._staged[own]\n",
        "                pass\n",
    ),
    Mutant(
        "a_second_backward_overwrites_the_committed_residual",
        "collectives/residuals.py",
        "self._continued = self.values.clone()",
        "self._continued = self.values",
    ),
    Mutant(
        "a_step_of_one_of_two_optimizers_commits_nothing",
        "collectives/residuals.py",
        "                self.values[own] = self._staged[own]\n",
        "                pass\n",
    ),
    Mutant(
        "a_residual_comes_back_after_a_load",
        "collectives/residuals.py",
        "        self.values[own] = 0\n        self._staged[own] = 0\n",
        "        self.values[own] = 0\n",
    ),
    Mutant(
        "momentum_of_sent_elements_stays",
        "collectives/residuals.py",
        "if self._momentum.has_masking:",
        "if not self._momentum.has_masking:",
    ),
    Mutant(
        "residuals_are_redistributed_in_every_step",
        "collectives/error_feedback.py",
        "        self.initial = None\n",
        "",
    ),
    Mutant(
        "velocities_are_neither_committed_nor_saved",
        "collectives/error_feedback.py",
        'self.kept |= {"sent": self.sent, "velocity": with_velocity.velocity}',
        'self.kept |= {"sent": self.sent}',
    ),
    Mutant(
        "shards_cut_through_the_blocks_of_the_codec_within_nodes",
        "collectives/hierarchical.py",
        "math.lcm(block_elements, compressor.block_elements))\n    return cuts",
        "block_elements)\n    return cuts",
    ),
    Mutant(
        "nodes_sum_gradients_in_their_short_dtype",
        "collectives/hierarchical.py",
        "dtype = sum_dtype(pieces[0].layout.dtype)",
        "dtype = pieces[0].layout.dtype",
    ),
    Mutant(
        "the_mean_of_nodes_is_not_divided",
        "collectives/hierarchical.py",
        "divisor = divisor or float(owners.size)",
        "divisor = divisor or 1.0",
    ),
    Mutant(
        "a_replica_takes_the_exact_difference",
        "collectives/low_precision_ring.py",
        "            self._compressor.decode(self._wire_W[own_bytes], layout, d_L)\n",
        "",
    ),
    Mutant(
        "the_left_and_the_right_replica_are_swapped",
        "collectives/low_precision_ring.py",
        "copies = [(left, self._replicas.left), (right, self._replicas.right)]",
        "copies = [(left, self._replicas.right), (right, self._replicas.left)]",
    ),
    Mutant(
        "the_ring_of_nodes_sends_sums_instead_of_means",
        "collectives/low_precision_ring.py",
        "                divide(sum_L, self._node_size, sum_L)\n",
        "",
    ),
    Mutant(
        "the_peers_never_change",
        "collectives/neighbourhood_mean.py",
        "round = round_index % self._topology.period(size)",
        "round = 0",
    ),
    Mutant(
        "the_weight_of_the_second_peer_is_ignored",
        "collectives/neighbourhood_mean.py",
        "if any(weight != first_weight for _, weight in rest):",
        "if any(weight != first_weight for _, weight in rest[1:]):",
    ),
    Mutant(
        "peers_of_a_round_choose_different_peers",
        "collectives/topology.py",
        "(rank - half - round) % half",
        "(rank - half + round) % half",
    ),
    Mutant(
        "factors_are_not_committed",
        "collectives/low_rank_mean.py",
        "        self.right, self.staged_right = self.staged_right, self.right\n",
        "",
    ),
    Mutant(
        "a_skipped_step_continues_from_the_staged_matrix",
        "collectives/low_rank_mean.py",
        "matrix.is_continued = matrix.is_staged and _is_within(own, parts)",
        "matrix.is_continued = matrix.is_staged",
    ),
    Mutant(
        "the_rank_with_the_highest_digest_sees_no_difference",
        "collectives/agreement.py",
        "if highest == -minus_lowest:",
        "if highest == digest:",
    ),
    Mutant(
        "a_rank_that_is_interrupted_in_attach_leaves_no_word",
        "collectives/agreement.py",
        '                self._store.leave("verdict", _encode({"left": left}))\n',
        "",
    ),
    Mutant(
        "a_group_closes_while_others_connect",
        "collectives/process_group.py",
        "            self._wait_until_all_are_open()\n",
        "",
    ),
    Mutant(
        "a_failed_attach_cannot_be_retried",
        "collectives/process_group.py",
        "            group_requests.add(counter, -1)",
        "            pass",
    ),
    Mutant(
        "rows_stay_in_the_order_of_ranks_within_nodes",
        "collectives/row_mean.py",
        "x_N.view(self._num_rows, -1).index_select(0, self._order).view(-1)",
        "x_N",
    ),
    Mutant(
        "residuals_of_a_shard_begin_at_the_bucket",
        "collectives/hierarchical.py",
        "self._mean = TwoPhaseMean(owners, compressor, spec, divisor, residuals=residuals, start=start)",
        "self._mean = TwoPhaseMean(owners, compressor, spec, divisor, residuals=residuals)",
    ),
    Mutant(
        "rows_within_a_node_are_summed_in_their_dtype",
        "collectives/row_mean.py",
        "sums = replace(row, dtype=sum_dtype(row.dtype))",
        "sums = row",
    ),
    Mutant(
        "gradients_within_a_node_have_the_default_timeout",
        "collectives/process_group.py",
        "return BaguaProcessGroup(by_hand, timeout=self.timeout, transport=within, global_ranks=members.global_ranks)",
        "return BaguaProcessGroup(by_hand, transport=within, global_ranks=members.global_ranks)",
    ),
)

CODECS = (
    Mutant(
        "means_are_multiplied_by_a_rounded_reciprocal",
        "codecs/base.py",
        "if math.frexp(divisor)[0] == 0.5:",
        "if math.frexp(divisor)[0] >= 0.5:",
    ),
    Mutant(
        "rows_are_summed_in_their_short_dtype",
        "codecs/base.py",
        "sums = out_L.new_empty(length, dtype=dtype)",
        "sums = out_L.new_empty(length)",
    ),
    Mutant(
        "the_residual_has_the_wrong_sign",
        "codecs/base.py",
        "torch.sub(x_N, left_out_N, out=left_out_N)",
        "torch.sub(left_out_N, x_N, out=left_out_N)",
    ),
    Mutant(
        "equal_chunks_have_the_bytes_of_the_shortest",
        "codecs/base.py",
        "num_bytes = [max(num_bytes)] * len(num_bytes)",
        "num_bytes = [min(num_bytes)] * len(num_bytes)",
    ),
    Mutant(
        "a_codec_replaces_another_with_its_name",
        "codecs/base.py",
        "if name in REGISTRY or name in ALIASES:",
        "if name in ALIASES:",
    ),
    Mutant(
        "payloads_are_one_block_late",
        "codecs/block_codec.py",
        "+ payload_bytes.cumsum(0) - payload_bytes\n",
        "+ payload_bytes.cumsum(0)\n",
    ),
    Mutant(
        "short_blocks_send_too_few_elements",
        "codecs/sparse.py",
        "return -(-lengths * self.kept // self.block)",
        "return (lengths * self.kept // self.block).clamp(min=1)",
    ),
    Mutant(
        "half_bytes_of_odd_blocks_have_no_room",
        "codecs/minmax_uint4.py",
        "(num_elements + num_odd) // 2)",
        "num_elements // 2)",
    ),
)

NATIVE = (
    Mutant(
        "the_reference_of_minmax_rounds_down",
        "native/minmax.py",
        "rounded = round_half_even((values_kl - coder.pivot) * coder.inverse)",
        "rounded = torch.floor((values_kl - coder.pivot) * coder.inverse)",
    ),
    Mutant(
        "the_reference_of_sign1bit_divides_by_the_padded_length",
        "native/sign1bit.py",
        "torch.full_like(total, length)",
        "torch.full_like(total, length + -length % _LANES)",
    ),
    Mutant(
        "the_reference_of_topk_sends_indices_unsorted",
        "native/topk.py",
        "return order_kl[:, : group.kept].sort(dim=1).values",
        "return order_kl[:, : group.kept]",
    ),
    Mutant(
        "the_reference_of_minmax_uint4_swaps_the_halves_of_a_byte",
        "native/minmax_uint4.py",
        "return pairs[:, ::2] | pairs[:, 1::2] << 4",
        "return pairs[:, ::2] << 4 | pairs[:, 1::2]",
    ),
    Mutant(
        "the_reference_of_qadam_adds_the_old_momentum_twice",
        "native/qadam.py",
        "momentum.copy_(moved)",
        "momentum.add_(moved)",
    ),
    Mutant(
        "the_reference_of_the_ring_takes_the_right_neighbour_whole",
        "native/ring.py",
        "difference.add_(torch.div(right, three))",
        "difference.add_(right)",
    ),
    Mutant(
        "the_reference_of_low_rank_adds_to_the_residual",
        "native/low_rank.py",
        "left_out[elements] -= total.view(-1)",
        "left_out[elements] += total.view(-1)",
    ),
    Mutant(
        "a_block_outside_the_wire_is_not_refused",
        "native/block_format.py",
        "good &= (header >= 0) & (header <= wire_bytes - self.header_bytes)",
        "good &= header >= 0",
    ),
    Mutant(
        "the_kernel_of_minmax_decodes_beyond_the_range",
        "../csrc_cuda/element/minmax.h",
        "return min_number(max_number(coder.pivot + steps * coder.step, coder.min), coder.max);",
        "return coder.pivot + steps * coder.step;",
    ),
    Mutant(
        "the_kernel_of_qadam_does_not_bound_a_step",
        "../csrc_cuda/element/qadam.h",
        "smaller(larger(moved / denominator, -step.largest_ratio), step.largest_ratio)",
        "moved / denominator",
    ),
)

RUNTIME = (
    Mutant(
        "a_job_is_queued_after_the_stop",
        "runtime/lane.py",
        "        worker.check_process()\n        with self._lock:\n",
        "        worker.check_process()\n        with nullcontext():\n",
    ),
    Mutant(
        "queued_jobs_never_end_after_a_failure",
        "runtime/lane.py",
        "                        queued.fail(error)\n",
        "                        pass\n",
    ),
    Mutant(
        "a_forked_process_waits_for_the_lane_of_its_parent",
        "runtime/lane.py",
        "return os.getpid() != self._process",
        "return False",
    ),
    Mutant(
        "errors_of_an_operation_lack_the_rank",
        "runtime/bucket.py",
        "failed on rank {group.rank}: {cause}",
        "failed: {cause}",
    ),
    Mutant(
        "a_bucket_does_not_count_its_rounds",
        "runtime/bucket.py",
        "        self.round_index += 1\n",
        "",
    ),
    Mutant(
        "any_operation_may_overlap_with_another_bucket",
        "runtime/bucket.py",
        "return sending[0] if len(sending) == 1 and",
        "return sending[0] if sending and",
    ),
    Mutant(
        "the_loss_scale_is_read_once",
        "runtime/gradient_runner.py",
        "        if self.needs_grad_scaler:\n",
        "        if self.needs_grad_scaler and self.loss_scale == 1.0:\n",
    ),
    Mutant(
        "a_joined_rank_ends_its_step_after_one_of_several_modules",
        "runtime/gradient_runner.py",
        "self._num_joined % max(len(self._parts), 1) == 0",
        "True",
    ),
    Mutant(
        "hooks_on_parameters_outlive_the_attachment",
        "runtime/parameter_state.py",
        "        average.close()\n",
        "        average.end()\n",
    ),
    Mutant(
        "a_rebuilt_bucket_starts_without_residuals",
        "runtime/parameter_state.py",
        "            return state.expand(part)\n",
        "            return [torch.zeros_like(kept) for kept in state.expand(part)]\n",
    ),
    Mutant(
        "additions_to_an_average_are_not_counted",
        "runtime/averaged_gradients.py",
        "            self._num_additions += 1\n",
        "",
    ),
    Mutant(
        "loads_of_weights_are_not_compared",
        "runtime/lockstep.py",
        "is_new = self.mark != self._compared",
        "is_new = False",
    ),
    Mutant(
        "ranks_in_different_calls_wait_for_each_other",
        "runtime/lockstep.py",
        "own = Progress(purpose, numbers,",
        'own = Progress("a call", numbers,',
    ),
    Mutant(
        "hooks_on_the_optimizer_outlive_the_attachment",
        "runtime/optimizer_steps.py",
        "                hook.remove()\n",
        "                pass\n",
    ),
    Mutant(
        "no_step_counts_after_one_that_raised",
        "runtime/optimizer_steps.py",
        "if not _is_running(self._outermost):",
        "if self._outermost is None:",
    ),
    Mutant(
        "a_listener_that_leaves_hides_a_step_from_the_next",
        "runtime/optimizer_steps.py",
        "for listener in tuple(self._listeners):",
        "for listener in self._listeners:",
    ),
    Mutant(
        "every_difference_of_weights_warns_again",
        "runtime/meeting.py",
        "        self.mute()\n        world = self._group.world\n",
        "        world = self._group.world\n",
    ),
    Mutant(
        "only_the_joined_rank_excuses_its_steps",
        "runtime/meeting.py",
        "or self.has_joined or other.has_joined",
        "or self.has_joined",
    ),
    Mutant(
        "masks_with_inf_become_nan",
        "runtime/weight_buckets.py",
        "is_equal = mean == snapshot if self.are_buffers else None",
        "is_equal = None",
    ),
    Mutant(
        "frozen_layers_are_no_longer_averaged",
        "runtime/weight_buckets.py",
        "return parameter.requires_grad or id(parameter) in self._averaged_ids",
        "return parameter.requires_grad",
    ),
    Mutant(
        "weights_change_when_a_state_adds_layers",
        "runtime/weight_runner.py",
        "values = [tensor.clone() for tensor in tensors]",
        "values = tensors",
    ),
    Mutant(
        "a_rank_loads_the_state_of_another",
        "runtime/rank_state.py",
        'if state["num_ranks"] == own["num_ranks"] and state["rank"] != own["rank"]:',
        "if False:",
    ),
)

ALGORITHMS = (
    Mutant(
        "gradient_allreduce_ignores_average",
        "algorithms/gradient/all_reduce.py",
        "bucket.append_centralized_synchronous_op(algorithm.hierarchical, algorithm.average)",
        "bucket.append_centralized_synchronous_op(algorithm.hierarchical)",
    ),
    Mutant(
        "compressed_allreduce_ignores_average",
        "algorithms/gradient/compressed.py",
        "            average=self._average,\n",
        "",
    ),
    Mutant(
        "flat_bytegrad_sums_within_nodes",
        "algorithms/gradient/compressed.py",
        "MeanCodecs(MinMaxUInt8(self.block), Identity() if self.hierarchical else None)",
        "MeanCodecs(MinMaxUInt8(self.block), Identity())",
    ),
    Mutant(
        "error_feedback_leaves_gradients_unscaled",
        "algorithms/gradient/feedback.py",
        "            bucket.flat.mul_(self._runner.loss_scale)\n",
        "            pass\n",
    ),
    Mutant(
        "error_feedback_commits_without_a_step",
        "algorithms/gradient/feedback.py",
        "if self._runner.has_joined:",
        "if not self._runner.has_joined:",
    ),
    Mutant(
        "a_mean_function_gets_more_than_is_sent",
        "algorithms/gradient/function.py",
        "            bucket.flat.copy_(sent)\n",
        "",
    ),
    Mutant(
        "topk_warms_up_one_step_too_short",
        "algorithms/gradient/topk.py",
        "min(num_steps * _NUM_STAGES // num_warm, _NUM_STAGES)",
        "min((num_steps + 1) * _NUM_STAGES // num_warm, _NUM_STAGES)",
    ),
    Mutant(
        "topk_loads_a_state_with_another_momentum",
        "algorithms/gradient/topk.py",
        'return {**super().state_arguments(process_group), "momentum": self.momentum}',
        "return super().state_arguments(process_group)",
    ),
    Mutant(
        "powersgd_starts_every_step_from_the_same_factor",
        "algorithms/gradient/powersgd.py",
        "mean(bucket.flat, self._warm_up.num_backward_passes)",
        "mean(bucket.flat, 0)",
    ),
    Mutant(
        "a_warm_up_counts_the_steps_of_each_optimizer",
        "algorithms/gradient/phases.py",
        "self.num_steps += int(self._has_backward)",
        "self.num_steps += 1",
    ),
    Mutant(
        "a_resumed_warm_up_forgets_its_backward_passes",
        "algorithms/gradient/phases.py",
        "self.num_backward_passes, self._has_backward = num_passes, False",
        "self._has_backward = False",
    ),
    Mutant(
        "qadam_sends_momenta_with_the_loss_scale",
        "algorithms/qadam/algorithm.py",
        "[(1.0 - beta1) / scale for beta1 in beta1s]",
        "[1.0 - beta1 for beta1 in beta1s]",
    ),
    Mutant(
        "qadam_keeps_the_loss_scale_in_the_momenta_of_a_joined_rank",
        "algorithms/qadam/algorithm.py",
        "        mean_N.div_(self._runner.loss_scale)\n",
        "",
    ),
    Mutant(
        "qadam_does_not_compare_its_warm_up",
        "algorithms/qadam/algorithm.py",
        "            self._agreement.compare(parameters_of(self._q_adam)[0].device)\n",
        "            pass\n",
    ),
    Mutant(
        "qadam_follows_changed_betas_after_the_warm_up",
        "algorithms/qadam/optimizer.py",
        "if betas != frozen:",
        "if betas[1] != frozen[1]:",
    ),
    Mutant(
        "async_averages_its_first_snapshot_for_ever",
        "algorithms/weights/asynchronous.py",
        '        if self._phase == "asked":\n            self._weights.read(SNAPSHOT)\n',
        '        if self._phase == "asked":\n',
    ),
    Mutant(
        "async_applies_a_difference_in_every_step",
        "algorithms/weights/asynchronous.py",
        "            self._pending = None\n            now_ns",
        "            now_ns",
    ),
    Mutant(
        "async_changes_weights_that_were_loaded_meanwhile",
        "algorithms/weights/asynchronous.py",
        "                    bucket.clear(bucket.difference, names)\n",
        "                    pass\n",
    ),
    Mutant(
        "async_forgets_in_its_state_that_it_was_stopped",
        "algorithms/weights/asynchronous.py",
        '        self._is_enabled = state["is_enabled"]\n',
        "",
    ),
    Mutant(
        "decentralized_resumes_with_the_first_peers",
        "algorithms/weights/decentralized.py",
        'self.rounds.load(state["step"], state["num_rounds"])',
        'self.rounds.load(state["step"])',
    ),
    Mutant(
        "decentralized_subtracts_a_snapshot_twice",
        "algorithms/weights/decentralized.py",
        "            self._in_flight[bucket] = None\n",
        "",
    ),
    Mutant(
        "low_precision_ring_lets_variances_become_negative",
        "algorithms/weights/low_precision_ring.py",
        "            is_bounded=bucket.are_buffers,\n",
        "",
    ),
    Mutant(
        "low_precision_ring_keeps_old_neighbours_after_a_load",
        "algorithms/weights/low_precision_ring.py",
        "            for replica in _REPLICAS.values():\n                for name, part",
        '            for replica in [_REPLICAS["weight"]]:\n                for name, part',
    ),
    Mutant(
        "diloco_does_not_commit_residuals",
        "algorithms/weights/diloco.py",
        "                self._residuals_of[bucket].commit()\n",
        "                pass\n",
    ),
    Mutant(
        "diloco_loses_loaded_weights_at_the_next_round",
        "algorithms/weights/diloco.py",
        "        self.shadow.restart(values)\n",
        "",
    ),
    Mutant(
        "diloco_changes_loaded_weights_by_the_round_in_flight",
        "algorithms/weights/diloco.py",
        "        self._drop_differences(values)\n",
        "",
    ),
    Mutant(
        "diloco_averages_buffers_that_still_change",
        "algorithms/weights/diloco.py",
        "                bucket.flat.copy_(bucket.snapshot)\n",
        "                pass\n",
    ),
    Mutant(
        "local_sgd_has_an_outer_momentum",
        "algorithms/weights/diloco.py",
        "    outer_momentum: float = 0.0\n",
        "    outer_momentum: float = 0.9\n",
    ),
    Mutant(
        "a_state_of_the_next_format_is_loaded",
        "algorithms/saved_state.py",
        'if described["version"] > FORMAT_VERSION:',
        'if described["version"] > FORMAT_VERSION + 1:',
    ),
    Mutant(
        "qadam_counts_updates_from_before_a_load_in_place",
        "algorithms/qadam/optimizer.py",
        "if known is None or known.step is not step or known.num_writes != num_writes(step):",
        "if known is None or known.step is not step:",
    ),
    Mutant(
        "arguments_of_a_function_are_not_compared",
        "algorithms/saved_state.py",
        "runner.parameter_state is not None or type(runner.impl)",
        "type(runner.impl)",
    ),
    Mutant(
        "diloco_applies_a_round_with_plus_inf",
        "algorithms/weights/diloco.py",
        "bool(low.isfinite() & high.isfinite())",
        "bool(low.isfinite())",
    ),
)

TRAINING = (
    Mutant(
        "ddp_keeps_the_algorithm_after_detach",
        "training/ddp.py",
        '    undo.callback(delattr, module, _HELD)\n    undo.callback(setattr, trampoline, "held", None)\n',
        "",
    ),
    Mutant(
        "hooks_of_a_forward_run_in_an_evaluation",
        "training/ddp.py",
        "if module in modules and module.training and torch.is_grad_enabled():",
        "if module in modules:",
    ),
    Mutant(
        "ranks_skip_a_step_alone",
        "training/grad_scaler.py",
        "                    found_inf.fill_(float(overflow))\n",
        "                    pass\n",
    ),
    Mutant(
        "the_grad_scaler_stays_changed_after_detach",
        "training/grad_scaler.py",
        "        if not shared.attached:\n            shared.undo()\n",
        "        if not shared.attached:\n",
    ),
    Mutant(
        "an_unknown_grad_scaler_warns_for_each_optimizer",
        "training/grad_scaler.py",
        "        self._has_found = True\n",
        "",
    ),
    Mutant(
        "no_backward_is_seen_after_one_that_raised",
        "training/steps.py",
        "            self._is_queued = False  # it is still True if the last backward raised\n",
        "            pass\n",
    ),
    Mutant(
        "a_late_optimizer_warns_in_every_step",
        "training/steps.py",
        "            self._has_warned_of_late = True\n",
        "",
    ),
    Mutant(
        "the_second_step_ends_with_its_first_optimizer",
        "training/steps.py",
        "            progress.is_done, progress.num_steps = False, 0\n",
        "            progress.num_steps = 0\n",
    ),
    Mutant(
        "hooks_on_the_module_outlive_the_attachment",
        "training/steps.py",
        "            undo.callback(wrapper.register_forward_hook(ModuleHook(after_forward)).remove)\n",
        "            wrapper.register_forward_hook(ModuleHook(after_forward))\n",
    ),
    Mutant(
        "a_resumed_rank_forgets_its_loss_scale",
        "training/attach.py",
        '                self._setup.grad_scaler.load_state_dict(state["grad_scaler"])\n',
        "                pass\n",
    ),
    Mutant(
        "a_state_overwrites_weights_within_averaged_weights",
        "training/attach.py",
        '        self._check_no_mean("load_rank_state_dict")\n',
        "",
    ),
    Mutant(
        "a_state_saved_within_averaged_weights_changes_later",
        "training/attach.py",
        'state["module"] = copy.deepcopy(module) if self._has_mean else module',
        'state["module"] = module',
    ),
    Mutant(
        "a_load_that_was_undone_counts_as_a_load",
        "training/weight_loads.py",
        "    if not any(load.has_changed for load in loads):\n        return False\n",
        "    return False\n",
    ),
    Mutant(
        "the_values_before_a_load_change_with_it",
        "training/weight_loads.py",
        "_Load(module, own_name, local_shard(tensor).clone())",
        "_Load(module, own_name, local_shard(tensor))",
    ),
    Mutant(
        "the_optimizer_keeps_the_mean_after_averaged_weights",
        "training/optimizer_weights.py",
        "                        self._exchange()\n                        self._exchanged, self._modes",
        "                        self._exchanged, self._modes",
    ),
    Mutant(
        "the_lint_of_collectives_warns_in_every_step",
        "training/lint/collectives.py",
        "        watch.remove(after_step)\n        if (number",
        "        if (number",
    ),
    Mutant(
        "the_lint_of_master_copies_warns_in_every_step",
        "training/lint/master_copies.py",
        "        self.close()\n        if torch.equal",
        "        if torch.equal",
    ),
    Mutant(
        "the_lint_of_gradients_leaves_its_hooks",
        "training/lint/unaveraged_gradients.py",
        "            gradient.hook.remove()\n",
        "            pass\n",
    ),
    Mutant(
        "the_lint_of_gradients_counts_backwards_of_earlier_steps",
        "training/lint/unaveraged_gradients.py",
        '        """Begin a new step."""\n        self._num_backwards = 0\n',
        '        """Begin a new step."""\n',
    ),
    Mutant(
        "the_lint_of_state_takes_a_momentum_for_weights",
        "training/lint/unaveraged_state.py",
        "if not (is_near and cosine >= _LEAST_COSINE and cosine > of_gradient):",
        "if not (is_near or cosine >= _LEAST_COSINE):",
    ),
    Mutant(
        "detach_during_an_exception_meets_the_other_ranks",
        "training/attach.py",
        "            is_leaving = failed or sys.exc_info()[0] is not None",
        "            is_leaving = failed",
    ),
    Mutant(
        "a_skipped_optimizer_counts_as_not_done_after_resuming",
        "training/steps.py",
        "            progress.is_done, progress.num_steps = count is not None, count or 0",
        "            progress.is_done, progress.num_steps = bool(count), count or 0",
    ),
    Mutant(
        "grad_scaler_keeps_its_entry_after_detach",
        "training/grad_scaler.py",
        "            shared.undo()\n            del scaler.__dict__[_SHARED]",
        "            shared.undo()",
    ),
    Mutant(
        "large_bucket_lint_counts_frozen_parameters",
        "training/lint/large_buckets.py",
        "    return parameter.nbytes if parameter.requires_grad else 0",
        "    return parameter.nbytes",
    ),
)

FSDP = (
    Mutant(
        "accumulated_shards_are_cleared_with_the_gradient",
        "fsdp/replicas.py",
        "gradient_L.clone() if stored is None else stored[1].add_(gradient_L)",
        "gradient_L if stored is None else stored[1].add_(gradient_L)",
    ),
    Mutant(
        "accumulated_shards_count_twice",
        "fsdp/replicas.py",
        "            gradient_L.zero_()\n",
        "",
    ),
    Mutant(
        "replicas_start_with_different_buffers",
        "fsdp/replicas.py",
        "map(local_shard, (*module.parameters(), *module.buffers()))",
        "map(local_shard, module.parameters())",
    ),
    Mutant(
        "ranks_with_different_rows_go_on",
        "fsdp/same_rows.py",
        "                self._require_same(own, compare())\n",
        "                compare()\n",
    ),
    Mutant(
        "ranks_that_expect_no_row_are_not_released",
        "fsdp/same_rows.py",
        "        self._complete_expected(previous, records)\n        self._require_same",
        "        self._require_same",
    ),
    Mutant(
        "fsdp_reads_a_row_that_is_still_in_flight",
        "fsdp/collectives.py",
        "parameter.dtype == out_L.dtype and parameter.grad is None and not has_gradient_hooks(parameter)",
        "parameter.dtype == out_L.dtype and not has_gradient_hooks(parameter)",
    ),
    Mutant(
        "sums_of_shards_are_divided",
        "fsdp/collectives.py",
        "        if op == dist.ReduceOp.SUM:\n            return 1.0\n",
        "        if op == dist.ReduceOp.SUM:\n            return float(self._runner.group.size)\n",
    ),
    Mutant(
        "a_gather_does_not_wait_for_the_one_before",
        "fsdp/collectives.py",
        "            last.result()\n",
        "            pass\n",
    ),
    Mutant(
        "fsdp_keeps_the_gather_after_detach",
        "fsdp/collectives.py",
        "    undo.callback(part.part.set_custom_all_gather, fsdp_all_gather(part.param_group)[0])\n",
        "",
    ),
)

OBSERVE = (
    Mutant(
        "overlapping_messages_count_twice",
        "observe/figures.py",
        "total += end - max(start, last)",
        "total += end - start",
    ),
    Mutant(
        "a_failed_observer_warns_in_every_step",
        "observe/observed.py",
        "unreported, self._unreported = self._unreported, []",
        "unreported = list(self._unreported)",
    ),
    Mutant(
        "a_failed_observer_is_still_notified",
        "observe/observed.py",
        "        self._observers = tuple(other for other in self._observers if other is not observer)\n",
        "",
    ),
    Mutant(
        "an_observer_given_twice_is_notified_twice",
        "observe/observed.py",
        "tuple({id(observer): observer for observer in observers}.values())",
        "tuple(observers)",
    ),
    Mutant(
        "a_summary_counts_the_events_of_earlier_steps_again",
        "observe/summary.py",
        "            self.figures.bucket_ns.clear()  # it would grow forever\n            self._pending.clear()\n",
        "            self.figures.bucket_ns.clear()\n",
    ),
    Mutant(
        "a_summary_serves_two_attachments",
        "observe/summary.py",
        "        if self.run is not None:\n            raise ValueError",
        "        if False:\n            raise ValueError",
    ),
    Mutant(
        "a_phase_that_raised_is_reported_as_complete",
        "observe/tracer.py",
        "        if exception_type is None:\n            self.end()\n",
        "        self.end()\n",
    ),
    Mutant(
        "residual_norm_has_one_entry_for_all_buckets",
        "observe/figures.py",
        "                self._residuals[event.bucket, name] = norm",
        '                self._residuals["", name] = norm',
    ),
)

MUTANTS = (
    *TRANSPORT,
    *COLLECTIVES,
    *CODECS,
    *NATIVE,
    *RUNTIME,
    *ALGORITHMS,
    *TRAINING,
    *FSDP,
    *OBSERVE,
)
