# Two images from one file: `stratalog` runs every role and every command, `spark` adds Spark with the data source.
#   docker build --target stratalog -t stratalog:local .
#   docker build --target spark -t stratalog-spark:local .
FROM python:3.11.13-slim-bookworm AS base
RUN useradd --uid 10001 --create-home stratalog && install -d -o stratalog -g stratalog /var/lib/stratalog
ENV PATH=/opt/stratalog/bin:$PATH PYTHONUNBUFFERED=1

FROM base AS build
WORKDIR /src
RUN python -m venv /opt/stratalog
COPY constraints/run.txt constraints/minio.txt constraints/
RUN pip install --no-cache-dir --no-deps -r constraints/run.txt -r constraints/minio.txt
COPY pyproject.toml README.md LICENSE ./
COPY core core
COPY metadata metadata
COPY bookies bookies
COPY tiering tiering
COPY broker broker
COPY pipeline pipeline
COPY cli cli
RUN pip install --no-cache-dir --no-deps --no-build-isolation .

FROM base AS stratalog
COPY --from=build /opt/stratalog /opt/stratalog
USER stratalog
WORKDIR /var/lib/stratalog
EXPOSE 9092 9300 9400
ENTRYPOINT ["stratalog"]

FROM build AS build-spark
COPY constraints/demo.txt constraints/
RUN pip install --no-cache-dir --no-deps -r constraints/demo.txt

FROM base AS spark
RUN apt-get update && apt-get install -y --no-install-recommends openjdk-17-jre-headless && rm -rf /var/lib/apt/lists/*
COPY --from=build-spark /opt/stratalog /opt/stratalog
COPY docs/examples /opt/stratalog/examples
USER stratalog
WORKDIR /opt/stratalog/examples
ENV PYSPARK_PYTHON=/opt/stratalog/bin/python
ENTRYPOINT ["spark-submit", "--conf", "spark.ui.enabled=false"]
