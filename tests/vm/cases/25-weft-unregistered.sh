# needs: weft
# seconds: 120
# Local buffers that nobody registered, whose pages are exchanged between operations in every way: rxe pins, so a kept registration that
# was used once too often would give the old contents. With the cache as it is, without the question to the kernel, with one that
# has room for one registration, and with none.
run() {
	for env in FI_WEFT_MR_CACHE_CHECK=1 FI_WEFT_MR_CACHE_CHECK=0 FI_MR_CACHE_MAX_COUNT=1 FI_MR_CACHE_MAX_COUNT=0; do
		echo "$env"
		export "${env?}" FI_LOG_LEVEL=warn
		fipeer_both weft weft 10.77.0.1 unregistered -n 36 >/tmp/out 2>&1 || { cat /tmp/out; return 1; }
		grep -q '^36 rounds$' /tmp/out || { cat /tmp/out; return 1; }
		grep -i 'userfaultfd' /tmp/out && { echo "nothing was kept"; return 1; }
		unset "${env%%=*}" FI_LOG_LEVEL
	done
}
