#!/bin/sh
# Makes the bucket `stratalog`, its lifecycle, and an account that may touch this bucket and nothing else. Safe to run again.
#
# Needs the MinIO client `mc` and nothing else (its image has no sed or grep), and: MINIO_ENDPOINT, MINIO_ROOT_USER,
# MINIO_ROOT_PASSWORD, and the account's AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.
set -eu

here=${0%/*}
attempts=60
until mc alias set store "$MINIO_ENDPOINT" "$MINIO_ROOT_USER" "$MINIO_ROOT_PASSWORD" >/dev/null 2>&1; do
    attempts=$((attempts - 1))
    if [ "$attempts" -eq 0 ]; then
        echo "no answer from $MINIO_ENDPOINT, or wrong root credentials" >&2
        exit 1
    fi
    sleep 1
done

mc mb --ignore-existing store/stratalog
# A deleted or overwritten object stays restorable for the days that lifecycle.json says.
mc version enable store/stratalog
mc ilm import store/stratalog <"$here/lifecycle.json"

mc admin policy create store stratalog-bucket "$here/policy.json"
mc admin user add store "$AWS_ACCESS_KEY_ID" "$AWS_SECRET_ACCESS_KEY"
case $(mc admin user info store "$AWS_ACCESS_KEY_ID") in
    *stratalog-bucket*) ;;
    *) mc admin policy attach store stratalog-bucket --user "$AWS_ACCESS_KEY_ID" ;;
esac
echo "bucket stratalog is ready"
