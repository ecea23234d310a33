"""Files of many requests, in OpenAI's batch format. `batch_lines` reads and writes lines, and `answer_lines` lets the
application answer them as if they came over HTTP. `run_batch_files` serves `octavo run-batch`; `batch_routes` and
`batch_job` serve /v1/files and /v1/batches.
"""
