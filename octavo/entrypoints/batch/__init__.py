"""Files of many requests, in OpenAI's batch format: `batch_lines` reads and writes their lines, `answer_lines` has the
application answer them as if they came over HTTP, `run_batch_files` does so for `octavo run-batch`, `batch_routes` and
`batch_job` for /v1/files and /v1/batches.
"""
