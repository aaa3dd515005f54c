"""From overrides to a request. To follow one, `batch=8` for instance, read these in order.

1. `attn_exp/commands/run.py` starts a run: `hydra_main.py` reads the command line, and `compose.py` composes `conf/`
   with the overrides into one configuration.
   Commands that are no Hydra programs (duel, log, backends) call `compose.compose_config`.
2. `compose.resolved_config` resolves the `${...}` in it, and `check.py` refuses keys that nothing reads. A mistake is
   a `UserError` of one sentence; `check.explain_error` turns Hydra's errors into one.
3. `request.py` makes a `Request` of the dictionary: the case, the backend and its options, how to measure. A hash over
   these names the job's folder, so the same choices are the same job.
4. Hydra calls `attn_exp/sweep/task_function.py`, whose session makes the request (`Session.request`) and queues it.
5. `attn_exp/execution/job_queue.py` writes the request into that folder and hands the folder to the worker, where
   `attn_exp/worker/measure.py` measures it and `attn_exp/worker/__main__.py` writes `record.json` beside it.

With several values (`-m batch=1,8`), Hydra calls `attn_exp/sweep/sweeper.py` instead; it submits the request of each
combination, which `attn_exp/sweep/product.py` composes.
"""
