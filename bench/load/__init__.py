"""Load on a server and what it measured: ``orca bench serve`` as a library.

::

    trace = make_trace(TraceConfig.of(TraceName.ORCA, num_requests=64, seed=1), vocab_size=49152)
    options = RequestOptions(model="smollm2-135m-instruct")
    async with open_client(Endpoint.parse("http://127.0.0.1:8000"), options) as client:
        records = await run_load(client, trace, max_concurrency=16)  # closed loop: 16 in flight
        records = await run_load(client, trace, arrivals_s=poisson_arrivals(len(trace), rate=4.0, seed=1))  # open loop
    summary = summarize(records)
    print(summary.output_tokens_per_s, summary.normalised.p50_ms)

======================  ================================================================================
``traces``              what is asked: prompts and output lengths, the same for the same seed
``words``               a prompt as text, where a server takes no token ids
``arrivals``            when it is asked, in an open loop
``endpoint``            where: URLs, TLS, API key; the protocol that clients have
``request_options``     what all requests have in common
``openai_client``       OpenAI's API over HTTP, on ``http_client`` and ``event_stream``
``gateway_client``      the gateway's gRPC API
``client``              the one of the two for an endpoint
``runner``              sends a trace and keeps time
``records``             what came of each request
``metrics``, ``goodput``  numbers of the field from records
``benchmark``           all of it: warm-up, then a run for each level of load
``report``, ``plot``    a benchmark as JSON and as a picture
======================  ================================================================================

It knows nothing of the services and imports nothing of ours but ``shared``.
"""
