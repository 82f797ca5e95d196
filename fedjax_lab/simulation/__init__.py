"""Whole runs: compiled chunks of rounds, evaluation, checkpoints.

The modules in the order in which a run meets them:

=====================  =======================================================================
``simulate``           a run's arguments, its preparation, its loop
``arguments``          what is refused before anything is compiled
``debugging``          JAX's settings for debugging
``stop``               Ctrl-C and SIGTERM
``processes``          what the processes of a run tell each other
``prepare``            what is computed, from the arguments of ``simulate`` and its kin, such as a
                       state of an earlier run
``computation``        what is computed: the method, the schedule of batches, the start
``client_data``        the clients' data of each chunk, resident or streamed
``placement``          where: the client map, the store of client rows, shardings
``chunk_planner``      the choice of a client map, which compiles what is going to run
``rounds``             a chunk of rounds as one program
``stores``             client rows on the devices; ``host_store``: on the host
``chunks``             the state, which the programs advance
``run_folder``         the run directory: rows, times, clients' scores and checkpoints
``run_log``            what a run records there, and when; its time is a ``stopwatch``
``divergence``         what is said of a chunk's metrics, and whether the run diverged
``client_updates``     the file with the numbers of each client
``scores``             the caller's evaluation functions
``history``            the rows and totals, and the reason why a run ends
``loggers``            hooks, the progress bar, a profile
``sweep``              many runs as one program: ``sweep_points``, ``sweep_program`` in place of
                       ``chunks``, ``sweep_log`` for its directories, ``sweep_result``
``plan``               a round on another machine, without running it
``evaluate``           functions for ``evaluate``; ``evaluate_personal``: for models of clients
=====================  =======================================================================
"""
