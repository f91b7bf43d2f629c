# What scripts of one lease share, sourced by them: steps within a limit, with codes and logs.
# They set out and work, and have TRY, PYTHON and LIMIT (570) from whoever starts them. Logs lie in logs (work/logs), codes
# in steps (out/steps.csv). keep_logs is called behind every step: who packs otherwise, or runs steps side by side, has
# another one.
try=${TRY:-} python=${PYTHON:-python3} limit=${LIMIT:-570} began=$SECONDS

pick() { if [ -n "$try" ]; then echo "$2"; else echo "$1"; fi; }  # ON_A_GPU WHEN_TRIED

left() { echo $((limit - SECONDS + began - ${1:-0})); }  # of the limit, less what comes behind

keep_logs() { tar -cJf "$out/.logs.tar.xz" -C "$work" logs && mv "$out/.logs.tar.xz" "$out/logs.tar.xz"; }

step() {  # NAME SECONDS COMMAND...: within its seconds and what is left; the end of its log goes on the screen
  local name=$1 room=$2 at=$SECONDS code
  shift 2
  if [ "$room" -gt "$(left)" ]; then room=$(left); fi
  timeout -k 5 "$((room > 1 ? room : 1))" "$@" > "${logs:-$work/logs}/$name.log" 2>&1
  code=$?
  echo "$name,$code,$((at - began)),$((SECONDS - began))" | tee -a "${steps:-$out/steps.csv}"
  tail -n 4 "${logs:-$work/logs}/$name.log"
  keep_logs
  return "$code"
}
