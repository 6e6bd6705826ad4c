"""Other servers beside orca on the same work: what `bench.peers` is made of.

===================  ===========================================================================
``environments``     a virtual environment for each peer, installed by pip
``hf_export``        the model as a Hugging Face folder in bfloat16, from its GGUF file
``server``           a server process: started, waited for, frozen, stopped
``systems``          orca, vLLM and OpenVINO GenAI: how each is set up and given a workload
``openvino_driver``  runs in OpenVINO's environment and knows nothing of ours
``machine``          what this machine is
``results``          one line for each run, and the table of medians and ratios
===================  ===========================================================================
"""
