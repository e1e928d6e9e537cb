"""Ways in which other sandbox systems are known to break, each reproduced on this one.

Every row has an id (A: completion and shell state, B: standard input, C: processes and timeouts, D: output,
E: lifecycle, F: capacity, G: control plane and protocol). Rows of the modules here run on every backend that makes
sandboxes of its own (`local`, `oci`, `docker`) unless the table says otherwise, and the session must answer after
each. The others need an engine, a registry, a gateway or a killed server and are tested where those are.
`test_table.py` checks that what the table names exists.

A1 A2 A3 A5 A6 A7 A9 A10 A11 A12 A13 A15 A16 A17 A19 A20 A22 A23 A25 A26 A28    test_a_completion
B1 B2 B4 B5                                                                     test_b_stdin
C1 C3 C4 C5 C7 C8 C10 C11 C12 C13 C14                                           test_c_processes
D1 D3 D5 D6 D8 D10                                                              test_d_output
E2 E4 E5 E9 E10 E12                                                             test_e_lifecycle
F1 F2 F5 F6 F7 F9                                                               test_f_capacity
G6 G8 G11 G13 G16                                                               test_g_protocol

C13   test_client::test_a_command_outlives_every_request
E1    test_docker::test_e1_an_engine_that_is_cut_off_between_create_and_start
E1    test_docker::test_e1_a_node_that_is_killed_between_create_and_start
E4    test_docker::test_e4_a_container_that_the_engine_killed_is_lost
E5    test_adoption::test_the_next_server_takes_over_what_a_killed_one_left
E5    test_docker::test_e5_the_next_node_takes_over_containers
E6    test_adoption::test_a_second_server_on_the_same_state_is_refused_and_hurts_nobody
E6    test_docker::test_a_killed_node_leaves_nothing_that_the_next_one_does_not_remove
E7    test_docker::test_e7_an_images_own_entrypoint_user_and_health_check_do_not_run
E7    test_docker::test_e7_an_image_without_bash_python_or_loader
E7    test_docker::test_e7_an_image_without_a_shell_is_told
E7    test_docker::test_e7_an_image_for_other_machines_is_told
E7    test_portable::test_an_image_without_python_bash_or_c_library
E7    test_image_pulls::test_an_image_that_cannot_run_here_is_named
F3    test_docker::test_containers_have_few_rights_no_network_and_no_ports
F5    test_docker::test_f5_an_engine_that_stalls_is_told_and_holds_nobody_up
F10   test_admission::test_a_full_disk_refuses_new_sandboxes_only
F10   test_image_pulls::test_a_full_disk_refuses_and_unused_images_go_first
F12   test_image_pulls::test_what_passes_is_waited_for
F12   test_image_pulls::test_what_does_not_pass_is_a_typed_refusal
F12   test_docker::test_f12_a_registry_that_misbehaves_is_a_typed_error
F13   test_image_pulls::test_sixteen_first_requests_are_one_pull
F13   test_docker::test_f13_sixteen_first_requests_are_one_pull
G1    test_pools::test_no_warm_sandbox_is_handed_out_twice
G2    test_pools::test_a_pool_that_never_gets_ready_costs_nobody_anything
G4    test_gateway_processes::test_a_gateway_that_is_killed_loses_and_repeats_nothing
G9    test_placement::test_from_eight_to_nine_nodes_about_a_ninth_of_the_images_move
G10   test_client::test_a_thousand_requests_at_a_time_from_one_client

Smaller here than in the reports: A23 has 100 starts, on `local`, and 4 of containers; C3 480 commands and not 25 000;
E9 some dozens of cycles and not 20 000 (a thousand are in the benchmark of leaks); E12 12 sandboxes and not 100; F13 an
image of 2 MB. F3's thousand idle sandboxes are in the benchmark of density: no bridge can run out of ports here.
"""
