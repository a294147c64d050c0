# docker build -t ckptx .                             inspect, convert, reshard, diff, verify; no torch
# docker build -t ckptx:run --build-arg EXTRAS=run .  with torch and transformers: verify --run, forecast, robustness
# docker run --rm -u "$(id -u):$(id -g)" -v "$PWD:/work" ckptx convert hf2dcp MODEL MODEL-dcp
FROM python:3.12-slim AS build
ARG EXTRAS=""
# The index that torch comes from; its builds for CPUs are a tenth of the size of those for CUDA.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY ckptx ckptx
RUN python -m venv /opt/ckptx \
    && /opt/ckptx/bin/pip install --no-cache-dir ${EXTRAS:+--extra-index-url "$TORCH_INDEX"} ".${EXTRAS:+[$EXTRAS]}"

FROM python:3.12-slim
COPY --from=build /opt/ckptx /opt/ckptx
ENV PATH=/opt/ckptx/bin:$PATH
RUN useradd --create-home ckptx
USER ckptx
WORKDIR /work
ENTRYPOINT ["ckptx"]
CMD ["--help"]
