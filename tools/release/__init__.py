"""Makes a release: wheel and source distribution, tried in clean environments, with its notes.

    python -m tools.release            # everything up to the upload, into dist/
    python -m tools.release.wheel      # the distributions alone
    python -m tools.release.environments dist/*.whl

Needs the extra ``release``; nvcc is fetched where there is none. Nothing is uploaded: the last line
that ``python -m tools.release`` prints says how.
"""
