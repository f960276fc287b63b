"""Stages of a comparison, in order: each takes the typed result of the previous stage and calls only lower packages.

========================  ====================================================  ==========================
module                    purpose                                               result
========================  ====================================================  ==========================
:mod:`.open_runs`         selects the records, drops corrupt ones, pairs token  :class:`.OpenedRuns`
                          rows
:mod:`.match_runs`        pairs the sites of both runs                          :class:`.MatchedRuns`
:mod:`.measure_pairs`     assembles, aligns and measures every pair             :class:`.MeasuredRuns`
:mod:`.detect_reroutes`   finds mismatches that rounding explains (near ties)   :class:`.ScreenedRuns`
                          and excludes the rows that depend on them
:mod:`.judge_sites`       noise floor, verdict, detectors, culprits, causes     :class:`.JudgedRuns`
:mod:`.first_steps`       judges the first steps again, where later steps hide  :class:`.JudgedRuns`
                          the start of an error
:mod:`.noise_run`         measures a second run of the baseline                 the measured noise floor
========================  ====================================================  ==========================

:mod:`tapscope.comparator.compare` calls the stages in this order and builds the report.
"""
