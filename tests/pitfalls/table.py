"""The faults that programs of this kind have really had, and the tests that keep ours from having them.

A: the text is wrong, or not the target's. B: the text is right, but the draft is of no use and nothing says so. Each
row names tests that fail if the fault is put in. `test_table.py` checks that they exist.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One kind of fault."""

    symptom: str
    tests: tuple[str, ...]
    """"file::function", from the folder of the tests on."""


TABLE: dict[str, Row] = {
    "A1": Row(
        "recurrent layers keep rejected rows, so that the text depends on the draft",
        (
            "backends/test_architectures.py::test_rollback_oracle",
            "backends/test_state.py::test_two_rejection_patterns_give_one_state",
            "backends/test_replay.py::test_two_rejection_patterns_give_one_recurrent_state",
            "backends/test_replay.py::test_replayed_states_equal_those_of_feeding_again",
            "audit/test_states.py::test_every_kind_passes_and_a_fault_in_it_is_named",
        ),
    ),
    "A2": Row(
        "tokens vanish because their id is the mask id",
        (
            "core/test_loop.py::test_mask_id_may_occur_anywhere",
            "backends/test_dflash_drafter.py::test_the_mask_id_is_never_proposed",
            "backends/test_draft_networks.py::test_the_mask_id_is_never_picked",
        ),
    ),
    "A3": Row(
        "the text stops early because the mask id is an end token",
        (
            "core/test_loop.py::test_mask_id_equal_to_end_of_sequence",
            "core/test_loop.py::test_stop_counts_only_what_was_emitted",
        ),
    ),
    "A4": Row(
        "an end token as the first token, or the second of several, does not end the text",
        (
            "core/test_loop.py::test_end_of_sequence_as_the_first_token",
            "core/test_loop.py::test_every_id_of_a_list_of_stop_ids_stops",
            "backends/test_conformance.py::test_end_ids_come_from_the_generation_config",
        ),
    ),
    "A5": Row(
        "the temperature is ignored, or sampled text does not have the target's law",
        (
            "core/test_reference.py::test_speculative_texts_have_the_law_of_plain_sampling",
            "core/test_lossless.py::test_loop_texts_have_the_law_of_the_target",
        ),
    ),
    "A6": Row(
        "acceptance collapses at temperatures above 0, because the draft's logits have a wrong scale",
        (
            "pitfalls/test_missing.py::test_the_scale_of_a_drafts_logits_changes_no_proposal",
            "core/test_sampled.py::test_the_better_policy_is_used_at_any_scale_of_the_logits",
            "check/test_measures.py::test_the_scale_of_the_logits_is_found",
            "check/test_probe.py::test_a_missing_logit_scale_is_found",
        ),
    ),
    "A7": Row(
        "biased samples through a wrong acceptance rule",
        (
            "core/test_reference.py::test_speculative_texts_have_the_law_of_plain_sampling",
            "core/test_reference.py::test_the_chi_square_test_notices_a_wrong_rule",
            "backends/test_sampling.py::test_rounds_equal_the_reference",
            "audit/test_audit.py::test_biased_sampling_is_caught",
        ),
    ),
    "A8": Row(
        "filters, penalties and bias are not applied to verified rows",
        (
            "core/test_lossless.py::test_every_option_gives_plain_text",
            "core/test_lossless.py::test_presence_penalty_changes_inside_the_block",
            "backends/test_sampling.py::test_every_option_gives_the_reference_text",
        ),
    ),
    "A9": Row(
        "cutting a proposal by what was drawn in it biases the text",
        (
            "pitfalls/test_missing.py::test_cutting_by_the_guess_itself_biases_nothing",
            "core/test_adaptive.py::test_the_two_token_counterexample",
            "core/test_sampled.py::test_the_two_token_counterexample",
        ),
    ),
    "A10": Row(
        "other tokens than plain decoding where two are nearly tied",
        (
            "backends/test_conformance.py::test_random_and_trained_drafts_change_nothing",
            "backends/test_conformance.py::test_adversarial_draft_changes_nothing",
            "backends/test_conformance.py::test_bf16_is_exact_where_the_probe_says_so",
            "backends/test_exactness.py::test_no_number_of_keys_changes_a_bit",
            "core/test_key_lengths.py::test_lengths_whose_sums_agree_are_found",
            "backends/test_draft_networks.py::test_every_kind_decodes_losslessly",
            "audit/test_texts.py::test_verdicts",
            "audit/test_audit.py::test_an_acceptor_that_takes_one_too_many_is_caught",
            "audit/test_audit.py::test_a_row_that_sees_the_next_one_is_caught",
        ),
    ),
    "A11": Row(
        "speed-ups on texts that loop or copy",
        (
            "core/test_textshare.py::test_a_loop_is_counted_from_its_second_round_on",
            "core/test_textshare.py::test_a_copy_of_the_prompt_is_counted_to_the_token",
            "audit/test_texts.py::test_a_looping_text_is_said_to_loop",
        ),
    ),
    "A12": Row(
        "guesses that a constraint forbids break it or are emitted (grammars are no option here yet; bans are)",
        (
            "pitfalls/test_missing.py::test_forbidden_guesses_at_every_slot",
            "pitfalls/test_missing.py::test_options_that_do_not_exist_are_refused",
        ),
    ),
    "A13": Row(
        "a second or cancelled request leaves something behind",
        (
            "backends/test_conformance.py::test_a_b_a",
            "backends/test_conformance.py::test_cancelled_request_leaves_no_trace",
            "backends/test_conformance.py::test_interleaved_requests",
            "core/test_loop.py::test_consumer_that_closes_early_leaves_a_usable_state",
        ),
    ),
    "A14": Row(
        "a residual of zeros where draft and target agree",
        (
            "core/test_reference.py::test_residual_of_equal_or_covering_q_falls_back_to_p",
            "core/test_reference.py::test_zero_probability_is_never_accepted_even_at_draw_zero",
        ),
    ),
    "A15": Row(
        "trees on layers with a window: ancestors beyond it, positions by row",
        (
            "backends/test_state_kinds.py::test_every_path_of_a_tree_equals_its_chain",
            "backends/test_state_kinds.py::test_window_masks_equal_their_definition",
            "core/test_tree.py::test_a_tree_of_one_chain_is_that_chain",
        ),
    ),
    "A16": Row(
        "tokens past the limit, or counted past it",
        (
            "core/test_loop.py::test_limit_at_every_offset_of_the_block",
            "core/test_loop.py::test_an_acceptor_or_target_cannot_push_tokens_past_the_limit",
        ),
    ),
    "B1": Row(
        "taps guessed by a formula, or wrong ones that fit",
        (
            "core/test_draft_config.py::test_a_missing_key_is_named_and_never_guessed",
            "backends/test_bad_input.py::test_fc_width_contradicts_the_taps",
            "check/test_check.py::test_taps_one_layer_off",
        ),
    ),
    "B2": Row("layer ids of another convention", ("core/test_dialect_rules.py::test_layer_ids_mean_outputs",)),
    "B2b": Row(
        "a block at the wrong position",
        (
            "pitfalls/test_missing.py::test_a_block_starts_where_the_target_ends",
            "backends/test_draft_model.py::test_positions_are_absolute",
            "backends/test_draft_networks.py::test_the_network_is_the_specification",
        ),
    ),
    "B3": Row(
        "no hook behind the last layer, or its normed output",
        (
            "backends/test_target.py::test_taps_are_layer_outputs",
            "backends/test_target.py::test_taps_outside_the_model_are_refused",
        ),
    ),
    "B4": Row(
        "a negative layer id wraps round",
        ("core/test_dialect_rules.py::test_layer_ids_that_wrap_or_contradict",),
    ),
    "B5": Row(
        "a wrong rotary base by default or from the wrong place",
        (
            "core/test_draft_config.py::test_rope_theta_wherever_it_stands",
            "core/test_draft_config.py::test_rope_theta_missing_conflicting_or_scaled",
            "core/test_dialect_rules.py::test_rotary_base_per_kind_of_layer",
        ),
    ),
    "B6": Row(
        "the anchor's slot misread",
        (
            "core/test_dialect_rules.py::test_anchor_layout",
            "check/test_check.py::test_the_anchor_read_the_other_way",
            "check/test_probe.py::test_the_better_reading_of_the_anchor_is_found",
        ),
    ),
    "B7": Row(
        "next to nothing is accepted, and nobody is told",
        (
            "core/test_parking.py::test_noise_is_parked_after_fifty_rounds_and_the_text_goes_on",
            "backends/test_parking.py::test_a_random_draft_is_parked",
        ),
    ),
    "B8": Row(
        "a draft trained bidirectional runs causal, or the reverse",
        (
            "core/test_dialect_rules.py::test_causality_and_windows",
            "core/test_dialect_rules.py::test_attention_keys_that_contradict",
            "pitfalls/test_missing.py::test_attention_is_described_layer_by_layer",
        ),
    ),
    "B9": Row(
        "a window off by one, or positions that shift when rows are dropped",
        (
            "backends/test_draft_networks.py::test_the_network_is_the_specification",
            "backends/test_draft_networks.py::test_proposals_are_those_of_the_specification",
        ),
    ),
    "B10": Row(
        "a full head in a draft with a reduced vocabulary",
        (
            "core/test_dialects.py::test_reduced_vocabulary_is_a_table_of_offsets",
            "core/test_dialects.py::test_reduced_vocabularies_that_cannot_be_right",
            "backends/test_dflash_drafter.py::test_a_draft_vocabulary_restricts_and_maps",
        ),
    ),
    "B11": Row(
        "a partial rotary factor copied from the target",
        ("core/test_draft_config.py::test_switches_that_are_off_change_nothing",),
    ),
    "B12": Row(
        "embeddings that the target scales are scaled twice or not at all",
        ("pitfalls/test_missing.py::test_a_block_reads_raw_embeddings_of_a_target_that_scales_them",),
    ),
    "B13": Row(
        "float16 overflows in the fusion of features",
        (
            "backends/test_dflash_drafter.py::test_huge_features_stay_finite",
            "backends/test_draft_model.py::test_weights_that_overflow_float16_are_refused",
        ),
    ),
    "B14": Row(
        "tensors that the network does not know are dropped",
        (
            "core/test_dialects.py::test_the_tensor_check_is_strict_both_ways",
            "backends/test_bad_input.py::test_missing_and_unexpected_draft_tensors",
        ),
    ),
    "B15": Row(
        "a scale of the logits read from the wrong level",
        (
            "pitfalls/test_missing.py::test_a_multiplier_at_either_level",
            "backends/test_draft_networks.py::test_proposals_are_those_of_the_specification",
        ),
    ),
    "B16": Row(
        "the draft of another target",
        (
            "backends/test_bad_input.py::test_draft_of_another_target",
            "check/test_conflicts.py::test_special_ids_of_another_target",
            "check/test_probe.py::test_noise_is_not_usable",
        ),
    ),
    "B17": Row(
        "code of a checkpoint is executed",
        (
            "backends/test_bad_input.py::test_code_in_a_target_is_not_run",
            "backends/test_hostile_drafts.py::test_hostile_folders_are_refused",
            "pitfalls/test_missing.py::test_code_in_a_draft_is_not_run",
        ),
    ),
    "B18": Row(
        "a repository that changed in place",
        (
            "backends/test_conformance.py::test_info",
            "pitfalls/test_missing.py::test_a_record_has_revision_and_hash_of_both",
            "test_resolve.py::test_hub_download_fetches_no_pickles_and_no_code",
            "check/test_check.py::test_a_good_draft_is_usable",
            "core/test_published.py::test_changes_on_the_hub_are_named",
        ),
    ),
}
