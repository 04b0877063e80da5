# needs: weft
# RLIMIT_MEMLOCK of 1 MiB: a large registration is -FI_ENOMEM with a log line that names the limit
# to raise, a small one works.
limited() { # BYTES
	(
		ulimit -l 1024
		# CAP_IPC_LOCK would make the kernel ignore the limit
		FI_LOG_LEVEL=warn with weft setpriv --bounding-set=-ipc_lock --inh-caps=-ipc_lock \
			"$FIPEER" -s -p weft -d rxe0 -z "$1" register 10.77.0.1
	) >/tmp/out 2>&1
	cat /tmp/out
}
run() {
	limited 65536 | grep -q '^fi_mr_reg 0 ' || { cat /tmp/out; return 1; }
	limited 67108864 | grep -q '^fi_mr_reg -12 ' || { cat /tmp/out; return 1; }
	grep weft /tmp/out | grep -E 'RLIMIT_MEMLOCK|ulimit -l'
}
