"""Files of many requests, in OpenAI's batch format: `lines` reads them, `runner` has them answered by the application
as if they came over HTTP, `files` does so for `octavo run-batch`, `routes` and `jobs` for /v1/files and /v1/batches."""
